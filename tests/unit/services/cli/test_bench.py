import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mesh.errors import PeerUnavailable, UnknownModel
from services.cli.bench import command
from tests.unit.services.cli.fake_endpoint import Answer, FakeEndpoint, serving

pytestmark = pytest.mark.live

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROOT = Path(__file__).resolve().parents[4]


def azure_trace(path: Path, rows: list[tuple[float, int, int]]) -> str:
    lines = [f"2023-11-16 18:15:{second:010.7f},{inputs},{outputs}\n" for second, inputs, outputs in rows]
    path.write_text(HEADER + "".join(lines))
    return str(path)


def bench(*args: str) -> Result:
    return CliRunner().invoke(command, list(args))


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return azure_trace(tmp_path / "trace.csv", [(0.0, 20, 4), (0.01, 30, 1), (0.02, 40, 3), (0.05, 10, 8)])


def test_replays_exact_lengths_and_reports_the_shared_form(trace: str, tmp_path: Path) -> None:
    def answer(body: dict[str, Any], index: int) -> Answer:
        return Answer(instance="ab"[index % 2], cached_tokens=5)

    out = tmp_path / "out.json"
    with serving(FakeEndpoint(answer)) as endpoint:
        result = bench("--trace", trace, "--url", endpoint.url, "--json", str(out), "--slo-ttft-ms", "60000",
                       "--seed", "9", "--api-key", "Secret")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert sorted((len(body["prompt"]), body["max_tokens"]) for body in endpoint.bodies) == [
        (10, 8),
        (20, 4),
        (30, 1),
        (40, 3),
    ]
    for body in endpoint.bodies:
        assert body["model"] == "demo"
        assert body["ignore_eos"] is True
        assert body["min_tokens"] == body["max_tokens"]
        assert all(3 <= token < 600 for token in body["prompt"])
    assert endpoint.keys == {"Secret"}
    report = json.loads(out.read_text())
    assert (report["requests"], report["errors"], report["policy"], report["seed"]) == (4, 0, "lmetric", 9)
    assert report["prefix_hit_rate"] == pytest.approx(4 * 5 / 100)
    assert report["per_instance"] == {"a": {"requests": 2, "share": 0.5}, "b": {"requests": 2, "share": 0.5}}
    assert report["slo"] == {"ttft_ms": 60000.0, "tpot_ms": None, "attainment": 1.0}
    assert 0 < report["ttft_ms"]["p50"] <= report["e2e_ms"]["p99"]
    assert "TTFT ms p99" in result.output
    assert "arrival lag of the client" in result.output


def test_times_are_those_of_the_stream(tmp_path: Path) -> None:
    trace = azure_trace(tmp_path / "trace.csv", [(0.0, 20, 6)])
    answer = Answer(first_token_after_s=0.15, token_after_s=0.02)
    with serving(FakeEndpoint(lambda body, index: answer)) as endpoint:
        result = bench("--trace", trace, "--url", endpoint.url, "--json", "-")
    report = json.loads(result.stdout)
    # Lower bounds hold on any machine; a slow one only makes things later.
    assert report["ttft_ms"]["mean"] >= 150
    assert report["tpot_ms"]["mean"] >= 19
    assert report["e2e_ms"]["mean"] >= 150 + 5 * 19


def test_failures_are_counted_told_and_the_exit_status(trace: str) -> None:
    answers = [Answer(), Answer(status=429), Answer(cut_after_tokens=1), Answer(error_event="engine died")]
    with serving(FakeEndpoint(lambda body, index: answers[index])) as endpoint:
        result = bench("--trace", trace, "--url", endpoint.url, "--json", "-")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert (report["requests"], report["errors"]) == (4, 3)
    assert "1 x HTTP 429: no room" in result.stderr
    assert "1 x engine died" in result.stderr
    assert "the endpoint closed the connection" in result.stderr


def test_answers_of_another_length_are_said_aloud(trace: str) -> None:
    with serving(FakeEndpoint(lambda body, index: Answer(tokens=2))) as endpoint:
        result = bench("--trace", trace, "--url", endpoint.url)
    assert result.exit_code == 0
    assert "4 answers are not as long" in result.stderr


def test_requests_beyond_the_context_are_shortened_and_said_aloud(tmp_path: Path) -> None:
    trace = azure_trace(tmp_path / "trace.csv", [(0.0, 90, 30), (0.01, 10, 2)])
    models = {"data": [{"id": "tiny", "max_model_len": 40}]}
    with serving(FakeEndpoint(models=models)) as endpoint:
        result = bench("--trace", trace, "--url", endpoint.url, "--vocab", "7:9")
    assert result.exit_code == 0
    assert "1 of them exceed the model's context of 40 tokens" in result.stderr
    assert sorted((len(body["prompt"]), body["max_tokens"]) for body in endpoint.bodies) == [(10, 2), (30, 10)]
    assert {token for body in endpoint.bodies for token in body["prompt"]} == {7, 8}


def test_options_shape_the_load(trace: str) -> None:
    with serving(FakeEndpoint()) as endpoint:
        result = bench("--trace", trace, "--url", endpoint.url + "/v1", "--clip", "0.005:0.04", "--length-scale", "2",
                       "--max-requests", "1", "--shared-prefix", "0.9", "--concurrency-limit", "1")  # fmt: skip
    assert result.exit_code == 0
    assert [(len(body["prompt"]), body["max_tokens"]) for body in endpoint.bodies] == [(60, 2)]


def test_shared_prefixes_reach_the_wire(tmp_path: Path) -> None:
    trace = azure_trace(tmp_path / "trace.csv", [(0.001 * index, 64, 1) for index in range(6)])
    with serving(FakeEndpoint()) as endpoint:
        bench("--trace", trace, "--url", endpoint.url, "--shared-prefix", "0.5", "--prefix-groups", "1")
    assert len({tuple(body["prompt"][:32]) for body in endpoint.bodies}) == 1
    assert len({tuple(body["prompt"]) for body in endpoint.bodies}) == 6


def test_a_concurrency_limit_that_bites_is_said_aloud(tmp_path: Path) -> None:
    trace = azure_trace(tmp_path / "trace.csv", [(0.0, 5, 1), (0.0, 5, 1), (0.0, 5, 1)])
    answer = Answer(first_token_after_s=0.03)
    with serving(FakeEndpoint(lambda body, index: answer)) as endpoint:
        result = bench("--trace", trace, "--url", endpoint.url, "--concurrency-limit", "1", "--json", "-")
    assert endpoint.connections == 2  # one for the list of models, one for all completions
    assert "2 requests waited for one of 1 slots" in result.stderr
    # Latencies count from the arrival: the third request waited for the two before it.
    assert json.loads(result.stdout)["ttft_ms"]["p99"] >= 80


@pytest.mark.slow
def test_the_plot_is_written(trace: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    plot = tmp_path / "cdf.png"
    with serving(FakeEndpoint()) as endpoint:
        result = bench("--trace", trace, "--url", endpoint.url, "--plot", str(plot))
    assert result.exit_code == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--trace", "nowhere.csv"], "cannot read the trace nowhere.csv"),
        (["--trace", "synthetic", "--clip", "5:2"], "START below END"),
        (["--trace", "synthetic", "--clip", "soon"], "START:END"),
        (["--trace", "synthetic", "--clip", "0:0.000001"], "arrives within --clip"),
        (["--trace", "synthetic", "--rate-scale", "0"], "--rate-scale"),
        (["--trace", "synthetic", "--length-scale", "1000000"], "beyond any context"),
        (["--trace", "synthetic", "--vocab", "500:3"], "START below END"),
        (["--trace", "synthetic", "--vocab", "3:"], "no range of token ids"),
        (["--trace", "synthetic", "--api-key", "a\r\nb"], "printable"),
        (["--trace", "synthetic", "--json", "/nowhere/at/all.json"], "its directory does not exist"),
        ([], "--trace"),
    ],
)
def test_wrong_use_is_refused_before_any_load(args: list[str], message: str) -> None:
    result = bench(*args, "--url", "http://127.0.0.1:9")
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())


def test_a_malformed_line_is_told_before_any_load(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "2023-11-16 18:15:46,1,1\nwhat,is,this\n")
    with serving(FakeEndpoint()) as endpoint:
        result = bench("--trace", str(path), "--url", endpoint.url)
    assert result.exit_code == 2
    assert "line 3" in result.output
    assert endpoint.bodies == []


def test_an_endpoint_that_cannot_be_used_is_named(trace: str) -> None:
    result = bench("--trace", trace, "--url", "http://127.0.0.1:9")
    assert isinstance(result.exception, PeerUnavailable)
    assert "cannot connect to 127.0.0.1:9" in str(result.exception)
    with serving(FakeEndpoint()) as endpoint:
        result = bench("--trace", trace, "--url", endpoint.url, "--model", "gpt-5")
    assert isinstance(result.exception, UnknownModel)
    assert "serves demo, not gpt-5" in str(result.exception)


INTERRUPTIBLE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from services.cli.bench import command
command()
"""
"""What runs in a shell's background inherits an ignored SIGINT, and these tests may."""


@pytest.mark.process
def test_ctrl_c_still_writes_the_report_so_far(tmp_path: Path) -> None:
    trace = azure_trace(tmp_path / "trace.csv", [(0.0, 5, 1), (0.01, 6, 1), (0.5, 7, 1), (50.0, 8, 1)])

    def answer(body: dict[str, Any], index: int) -> Answer:
        return Answer(first_token_after_s=300.0 if len(body["prompt"]) == 7 else 0.0)

    # The third is sent half a second after the others have ended, and never ends itself.
    out = tmp_path / "out.json"
    with serving(FakeEndpoint(answer)) as endpoint:
        process = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTIBLE,
             "--trace", trace, "--url", endpoint.url, "--json", str(out)],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            deadline_s = time.monotonic() + 30
            while len(endpoint.bodies) < 3 and time.monotonic() < deadline_s:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130, told
    assert "interrupted: 1 requests in flight" in told
    assert json.loads(out.read_text())["requests"] == 2
