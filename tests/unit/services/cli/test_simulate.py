import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mesh.errors import ConfigurationError
from services.cli.simulate import command
from services.cli.simulation.plan import PolicyChoice
from simulator.report.report import decode_report
from tests.unit.services.cli.console.recorded_page import recorded

SMALL = ("--trace", "synthetic", "--clip", "0:10", "--instances", "3", "--seed", "4")


def simulate(*args: str) -> Result:
    return CliRunner().invoke(command, list(args))


@pytest.mark.slow
def test_prints_the_table_and_writes_the_form_of_bench(tmp_path: Path) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    result = simulate(*SMALL, "--policy", "round_robin", "--json", str(out), "--plot", str(plot))
    assert result.exit_code == 0, result.output
    assert "TTFT ms mean" in result.output
    report = decode_report(out.read_bytes())
    assert report.requests > 0
    assert (report.errors, report.policy, report.seed) == (0, "round_robin", 4)
    assert set(report.per_instance) == {"instance-0", "instance-1", "instance-2"}
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_run_is_a_console_in_one_file(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("first.html", "second.html")]
    for file in files:
        result = simulate(*SMALL, "--rescheduler", "oracle", "--console", str(file))
        assert result.exit_code == 0, result.output
    recording = recorded(files[0])
    assert (recording["title"], [run["name"] for run in recording["runs"]]) == ("synthetic", ["penstock"])
    assert recording["runs"][0]["facts"]["requests"] == str(recording["runs"][0]["requests"])
    assert files[0].read_bytes() == files[1].read_bytes(), "equal options give equal files"
    assert "its directory does not exist" in simulate(*SMALL, "--console", "nowhere/out.html").output


def test_the_same_options_print_the_same_report_byte_for_byte() -> None:
    first, second = (simulate(*SMALL, "--json", "-") for _ in range(2))
    assert first.stdout_bytes == second.stdout_bytes
    assert json.loads(first.stdout)["requests"] > 0


def test_prefill_and_decode_apart() -> None:
    result = simulate(*SMALL, "--prefill-instances", "1", "--decode-instances", "2")
    assert result.exit_code == 0, result.output
    assert "transfers" in result.output
    split = ("--prefill-instances", "1", "--decode-instances", "2", "--json", "-")
    reports = [json.loads(simulate(*SMALL, *split, "--kv-bandwidth", rate).stdout) for rate in ("23", "0.5")]
    assert reports[0]["tpot_ms"]["mean"] < reports[1]["tpot_ms"]["mean"]
    assert isinstance(simulate(*SMALL, "--decode-instances", "4").exception, ConfigurationError)


def test_a_closed_loop_slows_down_with_the_mesh(tmp_path: Path) -> None:
    turn = '{"t": %d, "in": 600, "out": 40, "hash_runs": [[1, 9]], "api_time": 1.0, "think_time": 2.0}'
    turns = ", ".join(turn % (3 * number) for number in range(10))
    trace = tmp_path / "agents.jsonl"
    trace.write_text(f'{{"id": "a", "block_size": 64, "requests": [{turns}]}}\n')
    spans_s = []
    for device in ("H200", "L40S"):
        sizes = ("--model", "Llama-3.1-8B", "--device", device)
        result = simulate("--trace", str(trace), "--instances", "1", *sizes, "--json", "-")
        report = json.loads(result.stdout)
        assert report["requests"] == 10
        spans_s.append(report["requests"] / report["throughput_req_s"])
    # Nine pauses of 2 s, and ten answers in between.
    assert 18.0 < spans_s[0] < spans_s[1]


def test_parameters_of_the_policy_may_be_set_apart() -> None:
    reports = [
        simulate(*SMALL, "--json", "-", *words).stdout
        for words in (("--policy", "linear:lambda=0.2"), ("--policy", "linear", "--set", "lambda=0.2"))
    ]
    named, apart = (json.loads(report) for report in reports)
    assert named["ttft_ms"] == apart["ttft_ms"]
    assert isinstance(simulate(*SMALL, "--policy", "linear", "--set", "weight=1").exception, ConfigurationError)


def test_a_failed_mesh_is_told_by_the_exit_status() -> None:
    result = simulate(*SMALL, "--json", "-", "--fail", "0@2", "--fail", "1@2", "--fail", "2@2")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["errors"] > 0


def test_requests_beyond_the_context_are_shortened_and_counted() -> None:
    result = simulate(*SMALL, "--json", "-", "--max-model-len", "256")
    assert result.exit_code == 0
    assert "exceed the context of 256 tokens" in result.stderr


@pytest.mark.parametrize(
    "args",
    [
        ("--policy", "no_such_policy"),
        ("--policy", "lmetric:weight"),
        ("--fail", "soon"),
        ("--fail", "9@1"),
        ("--max-num-seqs", "4096"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(args: tuple[str, ...]) -> None:
    assert isinstance(simulate(*SMALL, *args).exception, ConfigurationError)


def test_an_unreadable_trace_is_a_usage_error(tmp_path: Path) -> None:
    assert simulate("--trace", str(tmp_path / "missing.csv")).exit_code == 2


def test_policy_parameters_are_read_from_the_name() -> None:
    choice = PolicyChoice.parse("linear:lambda=0.5")
    assert (choice.name, choice.parameters) == ("linear", {"lambda": 0.5})


@pytest.mark.parametrize("option", ["--rate-scale", "--report-interval-ms", "--kv-bandwidth", "--slo-ttft-ms"])
def test_nan_is_no_number_of_an_option(option: str) -> None:
    result = simulate(*SMALL, option, "nan")
    assert result.exit_code == 2
    assert "not a finite number" in result.output


def test_a_failure_at_no_time_is_refused() -> None:
    result = simulate(*SMALL, "--fail", "0@nan")
    assert isinstance(result.exception, ConfigurationError)


def test_an_empty_trace_is_told_from_a_clip_without_requests(tmp_path: Path) -> None:
    trace = tmp_path / "header.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    assert "has no requests" in simulate("--trace", str(trace)).output
    assert "arrives within --clip" in simulate("--trace", "synthetic", "--clip", "0:0.000001").output


@pytest.mark.parametrize(
    "options",
    [
        ("--tp", "2"),
        ("--weights", "fp8"),
        ("--levelled-attention",),
        ("--tables-of", "vidur"),
        ("--model", "Llama-3.1-8B", "--device", "H100", "--tables-of", "vidur"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(options: tuple[str, ...]) -> None:
    result = simulate(*SMALL, *options)
    assert isinstance(result.exception, ConfigurationError)
    assert "would change nothing" in str(result.exception)
