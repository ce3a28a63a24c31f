"""STAR's reproduction: its workloads, and that a run measures what it says."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from mesh.errors import TraceError
from simulator.cost.model import BatchShape
from simulator.reproductions.run import EngineEra
from simulator.reproductions.star.experiment import Experiment, Reschedules, Rival, cluster_of, run
from simulator.reproductions.star.jobs import Results, as_calls, experiments, small_key, with_seeds
from simulator.reproductions.star.lengths import (
    ALPACA,
    LONGEST_TOKENS,
    SHAREGPT,
    Quantiles,
    Workload,
    poisson_trace,
    servegen_workload,
)
from simulator.reproductions.star.reproduction import pair_by_pair
from simulator.reproductions.star.rows import COMPARED, all_rows
from simulator.reproductions.star.setups import FULL, QUICK, SMALL, SMALL_SLO, Plan

SHARES = (np.arange(100_000) + 0.5) / 100_000


@pytest.mark.parametrize(
    ("workload", "mean", "std", "percentiles"),
    [(SHAREGPT, 7542, 12008, (1536, 32670, 32679)), (ALPACA, 8596, 13354, (987, 32690, 32691))],
)
def test_outputs_are_those_of_table_2(workload: Workload, mean: int, std: int, percentiles: tuple[int, ...]) -> None:
    lengths = workload.outputs.at(SHARES)
    assert lengths.mean() == pytest.approx(mean, rel=0.03)
    assert lengths.std() == pytest.approx(std, rel=0.03)
    assert np.percentile(lengths, (50, 90, 95)).round().tolist() == list(percentiles)


def test_the_shares_that_the_text_gives() -> None:
    lengths = SHAREGPT.outputs.at(SHARES)
    assert (lengths < 1000).mean() == pytest.approx(0.292, abs=0.002)
    assert (lengths > 30_000).mean() == pytest.approx(0.173, abs=0.002)


def test_a_trace_has_its_rate_its_mean_and_fits_the_context() -> None:
    trace = poisson_trace(SHAREGPT, 0.2, 2000.0, seed=3)
    assert len(trace) == 400
    assert trace == poisson_trace(SHAREGPT, 0.2, 2000.0, seed=3)
    assert max(request.total_tokens for request in trace) <= LONGEST_TOKENS
    long = poisson_trace(SHAREGPT, 0.2, 200_000.0, seed=3)
    assert np.mean([request.output_tokens for request in long]) == pytest.approx(7580, rel=0.05)
    assert [request.arrival_s for request in trace] == sorted(request.arrival_s for request in trace)


def test_servegens_clients_weigh_by_rate(tmp_path: Path) -> None:
    path = tmp_path / "workload.jsonl.gz"
    clients = [
        {
            "trace": [[0, 3.0], [600, 3.0]],
            "dataset": {"0": {"input_tokens": {"10": 1.0}, "output_tokens": {"100": 1.0}}},
        },
        {
            "trace": [[0, 2.0]],
            "dataset": {"0": {"input_tokens": {"20": 1.0}, "output_tokens": {"900": 0.5, "50": 0.5}}},
        },
        {"trace": [[0, 9.0]], "dataset": None},
    ]
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(client) + "\n" for client in clients)
    outputs = servegen_workload(path).outputs.at(SHARES)
    assert (outputs == 900).mean() == pytest.approx(1 / 8, abs=0.01)
    assert (outputs == 50).mean() == pytest.approx(1 / 8, abs=0.01)
    path.write_bytes(gzip.compress(b'{"client": 1}\n'))
    with pytest.raises(TraceError, match="no ServeGen workload"):
        servegen_workload(path)


@pytest.mark.slow
def test_one_run_balances_and_counts() -> None:
    short = Workload(
        "short", Quantiles(((0.0, 20), (1.0, 60))), Quantiles(((0.0, 50), (0.7, 200), (0.8, 3000), (1.0, 4000)))
    )
    vllm = Experiment(SMALL, short, Reschedules.VLLM, 1.0, 200.0, SMALL_SLO)
    results = {system: run(replace(vllm, system=system)) for system in Reschedules}
    for system, result in results.items():
        assert 0 < result.goodput_req_s <= result.throughput_req_s <= 1.0
        assert (result.moved > 0) == (system is not Reschedules.VLLM)
    unbalanced = results[Reschedules.VLLM].exec_variance_ms2
    assert all(results[system].exec_variance_ms2 < unbalanced / 2 for system in Reschedules if results[system].moved)


def test_eras_differ_in_admission_and_only_our_own_systems_know_what_steps_cost() -> None:
    off = Experiment(SMALL, SHAREGPT, Reschedules.VLLM, 0.2, 60.0, SMALL_SLO)
    for era, whole_prompt in ((EngineEra.CURRENT, True), (EngineEra.VLLM_0_9, False)):
        config, _ = cluster_of(replace(off, engine_era=era))
        assert config.instance.whole_prompt_must_fit == whole_prompt
        assert all(spec.config.whole_prompt_must_fit == whole_prompt for spec in config.specs)
        assert {spec.profiled for spec in config.specs} == {None}
    config, cost = cluster_of(replace(off, system=Rival.TRAJECTORIES_ORACLE))
    costs = config.specs[-1].profiled
    assert costs is not None
    contexts = np.full(12, 10_000)
    measured = cost.step_ms(BatchShape((), contexts, int(contexts.sum())))
    fitted = costs.fixed_ms + 12 * costs.decode_request_ms + contexts.sum() * costs.context_token_ms
    assert fitted == pytest.approx(measured, rel=0.15)


@pytest.mark.slow
def test_trajectories_serve_everybody() -> None:
    short = Workload(
        "short", Quantiles(((0.0, 20), (1.0, 60))), Quantiles(((0.0, 50), (0.7, 200), (0.8, 3000), (1.0, 4000)))
    )
    result = run(Experiment(SMALL, short, Rival.TRAJECTORIES, 1.0, 60.0, SMALL_SLO))
    assert 0 < result.goodput_req_s <= result.throughput_req_s <= 1.0


def test_both_plans_give_the_same_kinds_of_rows() -> None:
    def runs(plan: Plan) -> set[str]:
        return set(experiments(plan, SHAREGPT, 0, EngineEra.CURRENT))

    assert {name for name in runs(QUICK) if "scale" not in name} <= runs(FULL)
    tiny = Plan(5.0, 5.0, (64,), (0.17, 0.23), 1)
    brief = {
        name: replace(experiment, seconds=5.0, hardware=replace(SMALL, decodes=2))
        for name, experiment in experiments(tiny, SHAREGPT, 0, EngineEra.CURRENT).items()
    }
    one = run(replace(next(iter(brief.values())), workload=ALPACA, rate_per_s=0.4))
    results = Results(dict.fromkeys(with_seeds(brief, 1), one))
    rows = all_rows(results, tiny, EngineEra.CURRENT)
    assert len({row.claim for row in rows}) == len(rows)
    assert all(row.why or row.paper == pytest.approx(row.ours) for row in rows if row.paper is not None)
    assert set(as_calls(brief)) == set(brief)


def test_pairs_are_runs_with_equal_requests() -> None:
    plan = Plan(5.0, 5.0, (64,), (0.17, 0.23), 2)
    jobs = with_seeds(experiments(plan, SHAREGPT, 0, EngineEra.CURRENT), plan.seeds)
    one = run(Experiment(replace(SMALL, decodes=2), ALPACA, Reschedules.VLLM, 0.4, 5.0, SMALL_SLO))
    outcomes = {name: msgspec.structs.replace(one, seed=job.seed) for name, job in jobs.items()}
    better = small_key(Reschedules.PREDICTED, 0.23, EngineEra.VLLM_0_9) + " #1"
    outcomes[better] = msgspec.structs.replace(outcomes[better], p99_tpot_ms=one.p99_tpot_ms / 2)
    rows = [line.split(" | ") for line in pair_by_pair(Results(outcomes), plan).splitlines()]
    of_eras = {era: [row for row in rows if row[0] == f"| {era}"] for era in EngineEra}
    assert [len(each) for each in of_eras.values()] == [len(COMPARED)] * 2
    counted = [row[3:] for row in of_eras[EngineEra.VLLM_0_9] if row[1:3] == ["STAR w/ prediction", "vLLM"]]
    assert counted == [["1 (3)", "0 (4)", "4 |"]]
    assert {row[3] for row in of_eras[EngineEra.CURRENT]} == {"0 (4)"}
