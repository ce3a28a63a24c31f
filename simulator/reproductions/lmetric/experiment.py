"""LMetric's experiments: the runs, and the results that rows and tables are made from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from controlplane.policies.registry import create_policy
from simulator.cluster.simulation import ClusterSimulation
from simulator.fluid_bound import fluid_bound
from simulator.report.interval import Estimate
from simulator.report.outcome import RequestOutcome
from simulator.report.report import Report, summarise
from simulator.reproductions.lmetric import setup
from simulator.reproductions.lmetric.hotspot import HOTSPOT_CONTENDERS, HotspotResult, measure_hotspot
from simulator.reproductions.run import ReproductionRun
from simulator.reproductions.sustainable_rate import RateSearch, sustainable_rate

# How unevenly prefill work falls on the instances (LMetric, section 4.3 and figure 27).


WINDOW_S = 10.0


def prefill_imbalance(outcomes: Sequence[RequestOutcome], instances: int) -> float:
    """Mean over windows of 10 s of the gap between the instances that prefilled most and least, in tokens.

    Tokens count in the window in which the request's first token came out; cached ones were not computed. The paper
    shows the time of prefill of two instances, whose difference this is for the two that differ most.
    """
    served = [outcome for outcome in outcomes if outcome.first_token_s is not None and not outcome.error]
    if not served:
        return 0.0
    windows = np.array([int((outcome.first_token_s or 0.0) // WINDOW_S) for outcome in served])
    windows -= windows.min()
    names = {name: number for number, name in enumerate(sorted({outcome.instance_id for outcome in served}))}
    tokens = np.zeros((int(windows.max()) + 1, max(instances, len(names))))
    for window, outcome in zip(windows.tolist(), served, strict=True):
        tokens[window, names[outcome.instance_id]] += outcome.input_tokens - outcome.cached_tokens
    return float((tokens.max(axis=1) - tokens.min(axis=1)).mean())


CHAT = setup.LOADS[0].name
HALF = 0.5
"""Share of the highest rate at which everything but the curve is measured (section 4.1)."""
SEEDS, QUICK_SEEDS = 5, 1
"""Of what is drawn: conversations, when sessions start, arrivals within the grid of the trace, and when instances
report. Settings of rivals are compared by the first one."""
FINDERS = ("lmetric, BS + 1", "bailian: lambda 0.7")
"""The higher of the highest rates of these is the testbed's; with --quick the first one's. All policies that look at
the cache are close to each other in it; vLLM's is far below."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Results of one policy under one load."""

    report: Report
    imbalance_tokens: float
    offered_req_s: float
    """Requests that arrived a second; in a closed loop that depends on the policy."""

    @property
    def ttft_ms(self) -> float:
        """Mean time to the first token, over all requests; 0 if none was answered."""
        return self.report.ttft_ms.mean or 0.0

    @property
    def tpot_ms(self) -> float:
        """Mean time per output token after the first; 0 if no answer had two."""
        return self.report.tpot_ms.mean or 0.0

    @property
    def hit_ratio(self) -> float:
        """Share of the prompt tokens that were cached."""
        return self.report.prefix_hit_rate or 0.0


Runs = Sequence[Placed]
"""One for each seed, the first seed first."""


def over_seeds(figure: Callable[..., float | None], *runs: Runs) -> Estimate:
    """Of the figure of the runs of each seed that all of them have."""
    return Estimate.of([value for each in zip(*runs, strict=False) if (value := figure(*each)) is not None])


@dataclass(frozen=True, slots=True)
class Highest:
    """The highest rate that the testbed serves of a load."""

    scale: float
    """Of the trace's own rate."""
    req_s: float
    finder: str


@dataclass(frozen=True, slots=True)
class OnLoad:
    """All runs of one load."""

    highest: Highest
    at_half: Mapping[str, Runs]
    """By contender: LMetric and variants by name, rivals as `NAME: SETTING`. Settings that are not the rival's best
    have one run."""
    best: Mapping[str, str]
    """For each rival the setting with the lowest mean TTFT, as it stands in `at_half`."""
    fluid_req_s: float
    """Rate that no schedule could exceed."""
    sweep: Mapping[str, Mapping[float, Runs]]
    """By contender, then by share of the highest rate."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of all runs: the loads by name, and the hotspot by policy, one for each seed."""

    loads: Mapping[str, OnLoad]
    hotspot: Mapping[str, Sequence[HotspotResult]]


def run_all(run: ReproductionRun) -> Measured:
    """Three rounds of independent jobs: the highest rates; at half of them all policies, the hotspot beside; the other
    rates and seeds."""
    replays = {load.name: setup.replay_of(run, load) for load in setup.LOADS}
    found = run.run_jobs(
        {
            f"{name}: highest rate, {finder}": partial(_highest, replay, finder, run.seed)
            for name, replay in replays.items()
            for finder in (FINDERS[:1] if run.quick else FINDERS)
        }
    )
    highest = {
        name: max((each for job, each in found.items() if job.startswith(f"{name}:")), key=lambda each: each.scale)
        for name in replays
    }
    placed = _run(run, _at_half(replays, highest, run.seed))
    best = {name: _best(replay, placed, run.seed) for name, replay in replays.items()}
    placed |= _run(run, _further(replays, highest, best, run))
    return Measured(
        {name: _on_load(replay, highest[name], best[name], placed, run) for name, replay in replays.items()},
        _hotspots(run),
    )


def contenders(replay: setup.Replay) -> dict[str, setup.Contender]:
    """Everything that is run at half the highest rate."""
    tuned = {
        f"{name}: {setting}": contender
        for name, settings in setup.rivals(replay.load.model, quick=replay.quick).items()
        for setting, contender in settings.items()
    }
    return {**setup.PLAIN, **tuned}


def seeds_of(run: ReproductionRun) -> range:
    """The first one decides which settings are a rival's best."""
    return range(run.seed, run.seed + (QUICK_SEEDS if run.quick else SEEDS))


_Job: TypeAlias = tuple[str, str, float, int]
"""Load, contender, share of the highest rate, seed."""


def _at_half(
    replays: Mapping[str, setup.Replay], highest: Mapping[str, Highest], seed: int
) -> dict[_Job, Callable[[], Placed]]:
    """All settings of all rivals, once."""
    return {
        (name, contender, HALF, seed): partial(_place, replay, contender, HALF * highest[name].scale, seed)
        for name, replay in replays.items()
        for contender in contenders(replay)
    }


def _further(
    replays: Mapping[str, setup.Replay],
    highest: Mapping[str, Highest],
    best: Mapping[str, Mapping[str, str]],
    run: ReproductionRun,
) -> dict[_Job, Callable[[], Placed]]:
    """The other seeds at half the highest rate, and the curve over the load: LMetric's and vLLM's for all seeds, the
    best rivals' for the first one. With --quick the curve is of the first load and seed, without rivals."""
    jobs: dict[_Job, Callable[[], Placed]] = {}

    def add(name: str, contender: str, share: float, seed: int) -> None:
        jobs[name, contender, share, seed] = partial(
            _place, replays[name], contender, share * highest[name].scale, seed
        )

    for name, replay in replays.items():
        for contender in (*setup.PLAIN, *best[name].values()):
            for seed in seeds_of(run)[1:]:
                if not run.quick or contender in (setup.OURS, setup.VLLM):
                    add(name, contender, HALF, seed)
        for share in replay.load.shares:
            if share == HALF or (run.quick and name != CHAT):
                continue
            for contender in (setup.OURS, setup.VLLM):
                for seed in seeds_of(run)[:1] if run.quick else seeds_of(run):
                    add(name, contender, share, seed)
            for contender in () if run.quick else best[name].values():
                add(name, contender, share, run.seed)
    return jobs


def _run(run: ReproductionRun, jobs: Mapping[_Job, Callable[[], Placed]]) -> dict[_Job, Placed]:
    results = run.run_jobs(
        {f"{name} | {contender} | {share:g} | {seed}": job for (name, contender, share, seed), job in jobs.items()}
    )
    return dict(zip(jobs, results.values(), strict=True))


def _hotspots(run: ReproductionRun) -> dict[str, Sequence[HotspotResult]]:
    results = run.run_jobs(
        {
            f"hotspot | {name} | {seed}": partial(measure_hotspot, contender, seed, run.quick)
            for name, contender in HOTSPOT_CONTENDERS.items()
            for seed in seeds_of(run)
        }
    )
    return {name: [results[f"hotspot | {name} | {seed}"] for seed in seeds_of(run)] for name in HOTSPOT_CONTENDERS}


def _on_load(
    replay: setup.Replay, highest: Highest, best: Mapping[str, str], placed: Mapping[_Job, Placed], run: ReproductionRun
) -> OnLoad:
    found: dict[str, dict[float, list[Placed]]] = {}
    for (name, contender, share, _), result in placed.items():
        if name == replay.load.name:
            found.setdefault(contender, {}).setdefault(share, []).append(result)
    return OnLoad(
        highest,
        {contender: shares[HALF] for contender, shares in found.items()},
        best,
        _fluid_req_s(replay, run.seed),
        {contender: dict(sorted(shares.items())) for contender, shares in found.items() if len(shares) > 1},
    )


def _highest(replay: setup.Replay, finder: str, seed: int) -> Highest:
    """The highest rate at which 90 % of the requests keep the SLO under this policy: an operator's profiling."""
    search = RateSearch(
        replay.load.start_scale,
        lowest_scale=replay.load.start_scale / 32,
        highest_scale=replay.load.start_scale * 32,
        growth=1.3,
        tolerance=0.12 if replay.quick else 0.04,
    )
    contender = contenders(replay)[finder]
    tried: dict[float, Placed] = {}

    def attainment_at(scale: float) -> float:
        tried[scale] = _simulated(replay, contender, scale, seed)
        return tried[scale].report.slo.attainment or 0.0

    scale = sustainable_rate(attainment_at, search).scale or search.lowest_scale
    return Highest(scale, tried[scale].offered_req_s, finder)


def _place(replay: setup.Replay, contender: str, scale: float, seed: int) -> Placed:
    return _simulated(replay, contenders(replay)[contender], scale, seed)


def _simulated(replay: setup.Replay, contender: setup.Contender, scale: float, seed: int) -> Placed:
    requests, warm = replay.requests(scale, seed)
    system = setup.system_of(replay, contender, seed)
    policy = create_policy(system.policy, system.parameters)
    outcomes = ClusterSimulation(requests, system.cluster, system.cost, policy).run()
    return placed(outcomes[warm:], replay, contender.policy, seed)


def placed(outcomes: list[RequestOutcome], replay: setup.Replay, policy: str, seed: int) -> Placed:
    """The results that are kept of a run."""
    report = summarise(outcomes, replay.load.slo, policy=policy, seed=seed)
    arrived_s = sorted(outcome.arrival_s for outcome in outcomes)
    span_s = arrived_s[-1] - arrived_s[0] if arrived_s else 0.0
    offered_req_s = (len(arrived_s) - 1) / span_s if span_s else 0.0
    return Placed(report, prefill_imbalance(outcomes, replay.instances), offered_req_s)


def _fluid_req_s(replay: setup.Replay, seed: int) -> float:
    requests, _ = replay.requests(1.0, seed)
    system = setup.system_of(replay, setup.PLAIN[setup.OURS], seed)
    return fluid_bound(requests, system.cluster, system.cost).requests_per_s


def _best(replay: setup.Replay, placed: Mapping[_Job, Placed], seed: int) -> dict[str, str]:
    best: dict[str, str] = {}
    for rival, settings in setup.rivals(replay.load.model, quick=replay.quick).items():
        names = [f"{rival}: {setting}" for setting in settings if setting != setup.NOT_TUNED]
        best[rival] = min(names, key=lambda name: placed[replay.load.name, name, HALF, seed].ttft_ms)
    return best
