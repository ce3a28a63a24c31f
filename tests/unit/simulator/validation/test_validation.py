"""Validation: measured clocks put together, engines in lockstep, and the published cases within their limits."""

import os
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from services.cli.validate import command
from services.cli.validation.bounds import is_kept, limit_of
from simulator.cost.model import BatchShape
from simulator.instance.config import InstanceConfig
from simulator.traces.request import TraceRequest
from simulator.validation.case import Case
from simulator.validation.engine_runs import measured_run
from simulator.validation.latencies import MeanLatencies
from simulator.validation.lockstep import run_in_lockstep
from simulator.validation.throughput import METRIC, summary


@pytest.fixture
def data() -> Path:
    folder = os.environ.get("PENSTOCK_DATA")
    if not folder:
        pytest.skip("PENSTOCK_DATA does not name the directory of the measurements")
    return Path(folder)


def row(arrival: float, queued: float, first: float, last: float, answer: int = 5) -> dict[str, str]:
    values = (arrival, queued, first, last)
    names = ("arrival_time", "queued_ts", "first_token_ts", "last_token_ts")
    return {"input_toks": "10", "output_toks": str(answer)} | dict(zip(names, map(str, values), strict=True))


def test_clocks_are_put_together_by_the_request_that_was_queued_the_fastest() -> None:
    # The engine's clock is 1000 s behind; the second request took 0.25 s to be queued.
    requests, outcomes = measured_run([row(1000.0, 0.0, 0.5, 1.5), row(1001.0, 1.25, 1.5, 2.5)])
    assert [request.arrival_s for request in requests] == [0.0, 1.0]
    assert [outcome.ttft_ms for outcome in outcomes] == pytest.approx([500.0, 500.0])
    assert [outcome.tpot_ms for outcome in outcomes] == pytest.approx([250.0, 250.0])
    assert MeanLatencies.of(outcomes).e2e_ms == pytest.approx(1500.0)


def test_engines_in_lockstep_share_the_load_and_the_pace() -> None:
    paces: list[int] = []

    def step_ms(batches: object) -> float:
        assert isinstance(batches, list)
        paces.append(sum(isinstance(batch, BatchShape) for batch in batches))
        return 10.0

    requests = [TraceRequest(0.0, 16, 4), TraceRequest(0.0, 16, 8), TraceRequest(0.05, 16, 2)]
    config = InstanceConfig(kv_blocks=64, max_model_len_tokens=256, max_batch_requests=8)
    outcomes = run_in_lockstep(requests, 2, config, step_ms)
    assert [outcome.e2e_ms for outcome in outcomes] == pytest.approx([40.0, 80.0, 20.0])
    assert paces == [2, 2, 2, 2, 1, 2, 2, 1]


def test_the_median_is_over_absolute_errors() -> None:
    rows = [Case.of(str(measured), METRIC, measured, 100.0) for measured in (50.0, 100.0, 200.0)]
    assert [case.error for case in rows] == [1.0, 0.0, -0.5]
    assert summary(rows).error == 0.5


def test_limits() -> None:
    assert limit_of(Case.of("vllm/x", "mean_ttft_ms", 1.0, 1.0)) == 0.10
    assert limit_of(Case.of("live/x", "mean_ttft_ms", 1.0, 1.0)) == 0.15
    assert limit_of(Case.of("splitwise/x", "prompt_128_ms", 1.0, 9.0)) is None
    assert is_kept(Case.of("vllm/x", "mean_e2e_ms", 100.0, 91.0))
    assert not is_kept(Case.of("vllm/x", "mean_e2e_ms", 100.0, 111.0))


def test_a_folder_without_tables_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, ["--data", str(tmp_path), "--suite", "splitwise"])
    assert result.exit_code != 0
    assert "splitwise_perf_model.csv.gz" in str(result.exception)


@pytest.mark.data
def test_published_runs_are_met_within_their_limits(data: Path) -> None:
    result = CliRunner().invoke(
        command, ["--data", str(data), "--suite", "vllm", "--suite", "splitwise", "--json"], catch_exceptions=False
    )
    cases = msgspec.json.decode(result.stdout.encode(), type=dict[str, list[Case]])["cases"]
    assert result.exit_code == 0, [case for case in cases if not is_kept(case)]
    assert len([case for case in cases if limit_of(case) == 0.10]) == 9
    assert {"name", "metric", "measured", "simulated", "error"} == set(msgspec.to_builtins(cases[0]))
