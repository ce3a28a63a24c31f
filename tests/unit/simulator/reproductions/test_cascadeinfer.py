"""CascadeInfer's reproduction: its profile, its rivals, and that every claim gets its row."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mesh.errors import TraceError
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig
from simulator.reproductions.cascadeinfer import findings
from simulator.reproductions.cascadeinfer.experiments import QUICK
from simulator.reproductions.cascadeinfer.profiling import (
    ProfileBounds,
    fit_on_halves,
    length_buckets,
    run_closed_loop,
)
from simulator.reproductions.cascadeinfer.systems import (
    RunResult,
    Setting,
    SystemKind,
    Variant,
    in_flight,
    profile_setting,
    run_system,
)
from simulator.reproductions.cascadeinfer.workload import poisson_requests, read_mooncake, read_sharegpt
from simulator.reproductions.run import ReproductionRun

BOUNDS = ProfileBounds(2.0, 8, 120, batch_factor=4)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A few dozen lengths in the files' formats."""
    rng = np.random.default_rng(0)
    (tmp_path / "lengths").mkdir()
    (tmp_path / "traces").mkdir()
    rows = [f"{rng.integers(20, 3000)},{rng.integers(5, 200)}" for _ in range(80)]
    text = "\n".join(["num_prefill_tokens,num_decode_tokens", *rows])
    (tmp_path / "lengths" / "sharegpt_8k_llama2.csv.gz").write_bytes(gzip.compress(text.encode()))
    lines = [json.dumps({"input_length": 2000 + 300 * n, "output_length": n % 60}) for n in range(40)]
    (tmp_path / "traces" / "mooncake_conversation.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return tmp_path


@pytest.mark.slow
def test_every_claim_gets_its_row(data: Path, tmp_path: Path) -> None:
    scale = replace(
        QUICK, duration_s=1.5, small_rates=(20.0, 60.0), moderate_rates=(10.0,), long_rates=(4.0,), profile=BOUNDS
    )
    run = ReproductionRun(data, tmp_path / "out", seed=0, quick=True, processes=1)
    run.plots.mkdir(parents=True)
    found = findings.measure(run, scale)
    claims = [row.claim for row in found.rows]
    assert len(claims) == len(set(claims)) == 39
    assert all(row.why for row in found.rows)
    assert all((run.plots / name).stat().st_size > 5000 for name in found.plots)
    assert all(section.markdown for section in found.sections)


@pytest.mark.slow
def test_equal_runs_are_equal(data: Path) -> None:
    setting = Setting("Llama-3.2-3B", data)
    setting = replace(setting, quality=profile_setting(setting, BOUNDS).fit.model)
    first, second = (run_system(setting, Variant(SystemKind.CASCADE), 30.0, 1.5) for _ in range(2))
    assert first == second
    assert sum(first.stages) == 16


def test_a_closed_loop_keeps_its_batch_and_measures_it() -> None:
    samples = run_closed_loop(
        [(100, 50)], 4, InstanceConfig(), LinearCost(), ProfileBounds(5.0, 4, 400), np.random.default_rng(0)
    )
    assert len(samples) > 16
    for sample in samples:
        assert sample.load.requests == pytest.approx(4)
        assert sample.load.input_tokens == pytest.approx(400)
        assert 400 < sample.load.total_tokens < 600
    # A step takes 9.98 ms and a bit; prefills come on top.
    assert 10 < np.mean([sample.normalised_latency_ms for sample in samples]) < 14


@pytest.mark.slow
def test_a_fit_of_the_linear_cost_model_predicts_it() -> None:
    rng = np.random.default_rng(1)
    lengths = [(int(i), int(o)) for i, o in zip(rng.integers(50, 3000, 200), rng.integers(20, 200, 200), strict=True)]
    result = fit_on_halves(lengths, InstanceConfig(), LinearCost(), ProfileBounds(20.0, 64, 600, 4), rng)
    assert result.fit.relative_error < 0.2 < result.fit.static_relative_error


def test_buckets_double() -> None:
    buckets = length_buckets([(10, 10), (100, 50), (150, 49), (150, 50), (700, 99), (700, 100)])
    assert buckets == [[(100, 50), (150, 49)], [(150, 50)], [(700, 99)], [(700, 100)]]


def test_little_in_flight_under_little_load_and_what_memory_holds_beyond_capacity(data: Path) -> None:
    setting = Setting("Llama-3.2-3B", data)
    model = profile_setting(setting, BOUNDS).fit.model
    config, _ = setting.instance(SystemKind.CASCADE)
    lengths = read_sharegpt(data / "lengths" / "sharegpt_8k_llama2.csv.gz")
    light, heavy = (in_flight(model, lengths, rate, config) for rate in (0.1, 1e6))
    assert light == 16
    assert 10 * light < heavy <= 16 * config.max_batch_requests


def test_arrivals_have_their_rate_and_end() -> None:
    requests = poisson_requests(((10, 5), (20, 6)), 50.0, 40.0, np.random.default_rng(0))
    assert 1800 < len(requests) < 2200
    assert requests[-1].arrival_s < 40.0
    assert {request.input_tokens for request in requests} == {10, 20}


@pytest.mark.parametrize("read", [read_sharegpt, lambda path: read_mooncake(path, 1000)])
def test_files_of_another_form_are_refused(read: object, tmp_path: Path) -> None:
    path = tmp_path / "lengths.gz"
    path.write_bytes(gzip.compress(b"a,b\n1,2\n"))
    with pytest.raises(TraceError, match="were expected"):
        read(path)  # type: ignore[operator]


def test_attainment_needs_both_bounds() -> None:
    figures = dict.fromkeys(
        ("rate_req_s", "mean_ttft_ms", "p95_ttft_ms", "mean_tpot_ms", "p95_tpot_ms", "normalised_ms",
         "p95_normalised_ms", "throughput_tok_s"), 0.0
    )  # fmt: skip
    result = RunResult(requests=4, ttfts_ms=(1, 1, 9, 1), tpots_ms=(1, 9, 1, float("nan")), **figures)
    assert result.attainment(5, 5) == 0.5
