"""Cascadia's reproduction on a few questions: its workloads, its systems, its composition of tiers, and every row."""

import gzip
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from controlplane.planning.cascade.parallelism import capacity
from controlplane.planning.cascade.replica import ReplicaCurve, ReplicaShape
from controlplane.planning.cascade.routing import ESCALATE_ALL
from controlplane.planning.cascade.sample import CascadeSample
from mesh.errors import PlanInfeasible, TraceError
from simulator.cascade.curves import SimulatedCurves
from simulator.cascade.deployed import Deployed, DrawnRequests, poisson_arrivals, serve
from simulator.cascade.tier import STEP_TOKENS, TierModel
from simulator.report.interval import Estimate
from simulator.reproductions.cascadia import accuracy, experiment, setup, systems, throughput
from simulator.reproductions.cascadia.cases import Case, SystemResult, tuned
from simulator.reproductions.cascadia.planning_problem import PlanningProblem
from simulator.reproductions.cascadia.plans import balance, gpus_of
from simulator.reproductions.cascadia.rows import latency_ratios, throughput_ratios
from simulator.reproductions.cascadia.run import Run
from simulator.reproductions.cascadia.scores import Answers, arena_traces, nearest, rescaled
from simulator.reproductions.cascadia.tables import ScaledCurves
from simulator.reproductions.cascadia.workload import TRACES, Workload
from simulator.reproductions.registry import reproduce
from simulator.reproductions.run import ReproductionRun
from simulator.reproductions.sustainable_rate import RateSearch
from tests.unit.simulator.cascade.short_runs import short_runs

QUESTIONS = 24
TIERS = setup.tiers_of((setup.LLAMA_SMALL, setup.MIDDLE), quick=True)
SHORT = replace(setup.QUICK, seconds=0.2, search_seconds=0.2, other_requests=5, tolerance=2.0)


def _answers(seed: int = 0) -> Answers:
    rng = np.random.default_rng(seed)
    scores = np.clip(rng.normal([50, 85], 20, (QUESTIONS, 2)), 0, 100)
    inputs, outputs = rng.integers(10, 200, QUESTIONS), rng.integers(5, 40, (QUESTIONS, 2))
    return Answers(scores, inputs, outputs, ("small", "large"), np.arange(QUESTIONS))


def _bench(rate_per_s: float = 5.0) -> PlanningProblem:
    sample = _answers().sample(rate_per_s)
    source = SimulatedCurves(sample, TIERS)
    rows = np.arange(QUESTIONS)
    by_load = tuple(source.curves(tier, rows, sample.output_tokens[:, tier]) for tier in range(2))
    return PlanningProblem(sample, TIERS, source, 16, 0.5, (8, 8), by_load)


@pytest.fixture(scope="module", autouse=True)
def _short_curves() -> Iterator[None]:
    with short_runs() as patch:
        patch.setattr(accuracy, "BURST", 4)
        yield


@pytest.fixture(scope="module")
def bench(_short_curves: None) -> PlanningProblem:
    return _bench()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three models for the tiers, one to tell the hard questions by; one answer without a score."""
    rng = np.random.default_rng(3)
    folder = tmp_path / "quality"
    folder.mkdir()
    small, large = "mistralai/Mixtral-8x7B-Instruct-v0.1", "gpt-4-1106-preview"
    models = ["other", small, "middle", large]
    arena = [["question", "prompt_sha", "prompt_chars", *models]]
    chars = [["question", *models]]
    for number in range(QUESTIONS):
        scores = np.clip(rng.normal([3, 7, 8, 9.3], 2), 1, 10).round()
        arena.append([str(number), "0", str(rng.integers(40, 400)), *map(str, scores)])
        chars.append([str(number), *map(str, rng.integers(20, 120, len(models)))])
    arena[5][3 + 1] = "-1"
    _write(folder / "arenabench_v1_gpt4_scores_even.csv.gz", arena)
    _write(folder / "arenabench_v1_answer_chars_even.csv.gz", chars)
    header = ["prompt_chars", "mixtral_8x7b_correct", "gpt4_1106_correct"]
    header += ["mixtral_8x7b_response_chars", "gpt4_1106_response_chars"]
    checked = [["90", str(number % 2), str(int(number % 9 > 0)), "60", "70"] for number in range(QUESTIONS)]
    _write(folder / "routellm_gsm8k.csv.gz", [header, *checked])
    turns = [["question_id", "turn", "model", "score"]]
    for number in range(QUESTIONS):
        turns += [[str(number), "1", small, str(1 + number % 10)], [str(number), "1", large, str(8 + number % 3)]]
    _write(folder / "routellm_mtbench.csv.gz", turns)
    return tmp_path


def _write(path: Path, rows: list[list[str]]) -> None:
    with gzip.open(path, "wt") as file:
        file.write("\n".join(",".join(row) for row in rows) + "\n")


@pytest.mark.slow
def test_every_claim_has_its_row_with_a_figure_or_a_reason(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {model: shapes[:1] for model, shapes in setup._QUICK_SHAPES.items()}
    monkeypatch.setattr(setup, "_QUICK_SHAPES", few)
    monkeypatch.setattr(experiment, "QUICK", SHORT)
    monkeypatch.setattr(setup, "MINUTE_S", (0.2, 0.2))
    monkeypatch.setattr(throughput, "_MAX_GROWTH", 1.0)
    monkeypatch.setattr(throughput, "_HELD", RateSearch(highest_scale=1.0, tolerance=2.0, target=0.5))
    run = ReproductionRun(data, tmp_path / "out", seed=3, quick=True, processes=1, journal=tmp_path / "journal")
    report = reproduce("cascadia", run)
    published = [row.paper for row in report.rows if isinstance(row.paper, float)]
    assert published[:12] == [4.0, 2.8, 5.0, 3.0, 5.0, 3.0, 2.5, 1.7, 3.3, 1.7, 3.3, 1.7]
    assert published[12:16] == [1.953, 1.629] * 2, "Sarathi-Serve"
    assert published[-20:-7] == [1.6, 1.4, 2.1, 1.7, 3.8, 2.6, 4.4, 2.2, 4.36, 3.03, 2.35, 1.7, 0.21]
    assert len({row.claim for row in report.rows}) == len(report.rows)
    assert all(row.ours is not None or row.why for row in report.rows)
    plots = {path.stem for path in (run.out / "plots").iterdir()}
    assert plots == {"attainment", "throughput", "tiers", "front"}
    before = run.journal.read_bytes() if run.journal else b""
    again = reproduce("cascadia", run)
    timed = "time of a plan"
    assert [row for row in again.rows if timed not in row.claim] == [
        row for row in report.rows if timed not in row.claim
    ]
    assert run.journal is not None
    assert before == run.journal.read_bytes(), "nothing is measured twice"
    page = (run.out / "report.md").read_text()
    assert "## Setup" in page
    assert "trace 3 (easy)" in page


def test_traces_differ_in_how_hard_they_are_by_models_that_stand_for_no_tier(data: Path) -> None:
    folder = data / "quality"
    traces, everything = arena_traces(
        folder / "arenabench_v1_gpt4_scores_even.csv.gz", folder / "arenabench_v1_answer_chars_even.csv.gz"
    )
    assert everything.stand_ins == ("mistralai/Mixtral-8x7B-Instruct-v0.1", "middle", "gpt-4-1106-preview")
    assert len(everything.scores) == QUESTIONS - 1, "one answer has no score"
    hard, mixed, easy = traces.values()
    assert len(hard.scores) == len(easy.scores) == round(2 / 3 * len(mixed.scores))
    assert len(set(hard.questions) | set(easy.questions)) == len(mixed.scores)
    assert (everything.scores[easy.questions] == easy.scores).all()


def test_files_of_another_form_are_named(data: Path) -> None:
    folder = data / "quality"
    with pytest.raises(TraceError, match="routellm_mtbench"):
        arena_traces(folder / "routellm_mtbench.csv.gz", folder / "routellm_gsm8k.csv.gz")


def test_scores_are_rescaled_and_models_chosen_by_their_means() -> None:
    assert rescaled(np.array([1.0, 5.5, 10.0])) == pytest.approx([0, 50, 100])
    assert nearest({"a": 10.0, "b": 90.0, "c": 60.0, "d": 88.0}, (50.0, 92.0, 80.0)) == ("c", "d", "b")


def test_requests_pass_tiers_until_an_answer_is_accepted_and_each_judgement_takes_its_time() -> None:
    sample = CascadeSample(
        scores=np.array([[80.0, 90.0], [20.0, 95.0]]),
        input_tokens=np.array([50, 50]),
        output_tokens=np.array([[10, 10], [10, 10]]),
        rate_per_s=1.0,
    )
    mixes = (((ReplicaShape(1), 1),), ((ReplicaShape(4), 1),))
    deployed = Deployed((50.0,), mixes, 87.5, (1.0, 0.5))
    far_apart = DrawnRequests(np.array([0.0, 100.0]), np.array([0, 1]))
    without, judged = (serve(sample, TIERS, deployed, far_apart, judge_s) for judge_s in (0.0, 2.0))
    assert judged.scores == pytest.approx([80.0, 95.0])
    assert judged.latencies_s - without.latencies_s == pytest.approx([2.0, 2.0]), "the last tier is not judged"
    assert without.latencies_s[1] > without.latencies_s[0]
    alone = serve(sample, TIERS, Deployed((ESCALATE_ALL,), ((), mixes[1]), 92.5, (0.0, 1.0)), far_apart, 2.0)
    assert judged.latencies_s[1] == pytest.approx(without.latencies_s[0] + 2.0 + alone.latencies_s[1])


def test_requests_that_reach_a_tier_without_replicas_are_refused(bench: PlanningProblem) -> None:
    deployed = Deployed((100.0,), (((ReplicaShape(1), 1),), ()), 80.0, (1.0, 1.0))
    with pytest.raises(PlanInfeasible, match="which has no replica"):
        serve(bench.sample, TIERS, deployed, poisson_arrivals(bench.sample, 5.0, 2.0, 0), 0.0)


@pytest.mark.slow
def test_an_overloaded_deployment_keeps_all_that_come_in_its_queue(bench: PlanningProblem) -> None:
    sample = replace(bench.sample, output_tokens=np.full((QUESTIONS, 2), 2), input_tokens=np.full(QUESTIONS, 5))
    deployed = Deployed((0.0,), (((ReplicaShape(1), 1),), ()), 50.0, (1.0, 0.0))
    at_once = DrawnRequests(np.zeros(5000), np.resize(np.arange(QUESTIONS), 5000))
    assert (serve(sample, TIERS, deployed, at_once, 0.0).latencies_s > 0).all()


def test_a_tier_between_that_accepts_nothing_is_skipped() -> None:
    sample = CascadeSample(
        scores=np.array([[20.0, 30.0, 95.0]]),
        input_tokens=np.array([50]),
        output_tokens=np.array([[10, 10, 10]]),
        rate_per_s=1.0,
    )
    mixes = (((ReplicaShape(1), 1),), (), ((ReplicaShape(4), 1),))
    deployed = Deployed((50.0, ESCALATE_ALL), mixes, 95.0, (1.0, 0.0, 1.0))
    tiers = (TIERS[0], TIERS[0], TIERS[1])
    served = serve(sample, tiers, deployed, DrawnRequests(np.array([0.0]), np.array([0])), 0.0)
    assert served.scores == pytest.approx([95.0])
    assert served.tier_p95_s[1] == 0.0


def test_a_seed_draws_the_same_requests_at_any_rate(bench: PlanningProblem) -> None:
    slow, fast = (poisson_arrivals(bench.sample, rate, 20.0 / rate, 7) for rate in (1.0, 4.0))
    assert (slow.rows == fast.rows).all()
    assert slow.times_s == pytest.approx(4 * fast.times_s)


@pytest.mark.parametrize("name", list(systems.SYSTEMS))
def test_every_system_meets_the_target_on_no_more_gpus_than_there_are(bench: PlanningProblem, name: str) -> None:
    deployed = systems.SYSTEMS[name](bench, 70.0)
    assert deployed.quality >= 70.0
    assert deployed.is_within
    assert 0 < sum(shape.gpus * count for mix in deployed.mixes for shape, count in mix) <= bench.gpus


def test_the_stand_alone_model_is_the_smallest_that_meets_the_target_or_the_best(bench: PlanningProblem) -> None:
    small, large = bench.sample.scores.mean(axis=0)
    assert systems.stand_alone_tier(bench.sample, small - 1) == 0
    assert systems.stand_alone_tier(bench.sample, (small + large) / 2) == 1
    assert systems.stand_alone_tier(bench.sample, 100.0) == 1


def test_a_load_that_no_deployment_holds_is_marked_or_refused(bench: PlanningProblem) -> None:
    crowded = bench.at(100_000.0)
    assert not systems.stand_alone(crowded, 70.0).is_within
    assert not systems.cascade_serve(crowded, 70.0).is_within
    with pytest.raises(PlanInfeasible):
        systems.cascadia(crowded, 70.0)


def test_cascade_serve_takes_one_shape_a_tier_and_does_not_look_at_who_is_escalated(bench: PlanningProblem) -> None:
    deployed = systems.cascade_serve(bench, 70.0)
    assert all(len(mix) <= 1 for mix in deployed.mixes)
    longer = replace(bench.sample, output_tokens=bench.sample.output_tokens * 2)
    assert systems.cascade_serve(replace(bench, sample=longer), 70.0) == deployed


def test_cascade_serve_is_tuned_to_the_shapes_whose_slowest_tier_is_fastest_at_the_load(bench: PlanningProblem) -> None:
    rates = np.array([0.1, 10.0])
    slow = ReplicaCurve(ReplicaShape(1), rates, np.array([4.0, 9.0]), rates, 11.0)
    fast = ReplicaCurve(ReplicaShape(2), rates, np.array([1.0, 2.0]), rates, 11.0)
    sample = replace(bench.sample, scores=np.tile([10.0, 90.0], (QUESTIONS, 1)), rate_per_s=12.0)
    problem = replace(bench, sample=sample, by_load=((slow, fast), (slow, fast)), gpus=3)
    by_itself = systems.cascade_serve(problem, 50.0)
    assert by_itself.thresholds == (ESCALATE_ALL,)
    assert by_itself.mixes == ((), ((ReplicaShape(1), 3),)), "one fast replica does not hold 12 requests/s"
    assert systems.cascade_serve(problem.at(9.0), 50.0).mixes == ((), ((ReplicaShape(2), 1),))
    crowded = systems.cascade_serve(problem.at(90.0), 50.0)
    assert not crowded.is_within
    assert crowded.mixes == ((), ((ReplicaShape(1), 3),)), "the least overloaded"


@pytest.mark.slow
def test_a_saturated_rate_is_of_the_highest_rate_that_a_system_holds(bench: PlanningProblem) -> None:
    assert throughput.saturated_per_s(systems.cascadia, bench, 99.99, 0) is None
    system = systems.SYSTEMS[systems.STAND_ALONE]
    few, many = (throughput.saturated_per_s(system, replace(bench, gpus=gpus), 60.0, 0) for gpus in (4, 16))
    assert few is not None
    assert many is not None
    assert many > few


def test_uniform_parallelism_is_whole_servers_first() -> None:
    two = np.array([1.0, 2.0])
    measured = tuple(ReplicaCurve(ReplicaShape(tp), two, two, two, 9.0) for tp in (1, 2, 4, 8))
    uniform = systems._uniform(capacity(measured, 1), 32)
    assert uniform.mix(23, 0.1) == tuple((ReplicaShape(tp), count) for tp, count in ((1, 1), (2, 1), (4, 1), (8, 2)))
    without_small = systems._uniform(capacity(measured[3:], 1), 32)
    assert without_small.mix(23, 0.1) == ((ReplicaShape(8), 2),), "what is left holds no replica"


@pytest.mark.slow
def test_scaled_curves_are_those_of_all_requests_by_the_work_of_these() -> None:
    answers = _answers()
    everything = answers.sample(1.0)
    known = SimulatedCurves(everything, TIERS)
    tokens = everything.output_tokens[:, 0]
    original = known.curves(0, np.arange(QUESTIONS), tokens)
    same = ScaledCurves(everything, everything, TIERS, known.measured, 0).curves(0, np.arange(QUESTIONS), tokens)
    assert [curve.rates_per_s.tolist() for curve in same] == [curve.rates_per_s.tolist() for curve in original]
    longest = np.argsort(known.work(0).whole_s)[-5:]
    slower = ScaledCurves(everything, answers.only(longest).sample(1.0), TIERS, known.measured, 0)
    scaled = slower.curves(0, np.arange(5), tokens[longest])
    assert scaled[0].rates_per_s[0] < original[0].rates_per_s[0]
    assert scaled[0].p95_s[0] >= original[0].p95_s[0]
    assert scaled[0].mean_s[0] > original[0].mean_s[0]


def test_targets_that_no_thresholds_reach_are_left_out(data: Path) -> None:
    size = replace(SHORT, targets=(99.99, 60.0))
    workload = Workload(TRACES[0], data, (setup.SMALL, setup.MIDDLE, setup.LARGE), (8, 8, 16), (), 0, size)
    assert 60.0 < workload.reachable < 99.99
    assert workload.targets == (60.0,)


def test_engines_of_another_chunk_size_have_tables_of_their_own() -> None:
    usual = TierModel("Llama-3.1-8B", "H100", max_gpus=1)
    small = replace(usual, step_tokens=512)
    assert usual == replace(usual, step_tokens=STEP_TOKENS)
    assert usual.key != small.key
    assert [replica.engine.max_step_tokens for tier in (usual, small) for replica in tier.replicas()] == [2048, 512]


def run_of(*p95_s: float) -> Run:
    deployed = Deployed((50.0,), (((ReplicaShape(2), 3),), ((ReplicaShape(4), 1),)), 80.0, (1.0, 0.5))
    tails_s = tuple((tail_s / 2, tail_s) for tail_s in p95_s)
    return Run(deployed, p95_s, (80.0,) * len(p95_s), tails_s, (0.0, max(p95_s)))


def test_ratios_are_of_equal_seeds() -> None:
    results = {
        systems.CASCADIA: SystemResult(run_of(2.0, 4.0), saturated_per_s=30.0),
        systems.STAND_ALONE: SystemResult(run_of(6.0, 8.0), saturated_per_s=10.0),
        systems.UNIFORM_ALLOCATION: SystemResult(refused="no way"),
    }
    case = Case("trace", 80.0, 1.0, 2.0, 1, 90.0, results)
    assert latency_ratios([case], systems.STAND_ALONE) == [(3.0, 2.0)]
    assert latency_ratios([case], systems.UNIFORM_ALLOCATION) == latency_ratios([case], systems.SARATHI) == []
    assert throughput_ratios([case], systems.STAND_ALONE, is_saturated=True) == [(3.0,)]
    assert throughput_ratios([case], systems.STAND_ALONE, is_saturated=False) == []
    assert case.scale(systems.CASCADIA) == Estimate.of([1.0, 2.0])
    assert case.scale(systems.UNIFORM_ALLOCATION) == Estimate(None)
    run = case.runs[systems.CASCADIA]
    assert balance(run) == (0.5, 1.0)
    assert [gpus_of(mix) for mix in run.deployed.mixes] == [6, 4]


def test_a_tuned_system_has_the_best_of_each_figure() -> None:
    slow = SystemResult(run_of(5.0, 5.0), saturated_per_s=9.0)
    quick = SystemResult(run_of(4.0, 5.0), sustained_per_s=3.0, saturated_per_s=8.0)
    assert tuned([slow, quick]) == SystemResult(quick.run, sustained_per_s=3.0, saturated_per_s=9.0)
    refused = SystemResult(refused="no way")
    assert tuned([refused, refused]) == refused
