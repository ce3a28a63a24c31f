"""The regret suite: all traces at hand, at shares of the rate that the best policy sustains, under many policies."""

import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from controlplane.policies.lmetric import LMetric
from controlplane.policies.registry import POLICIES
from mesh.errors import ConfigurationError
from simulator.cache_bound import cache_bound
from simulator.cluster.config import ClusterConfig, KvReuseConfig
from simulator.cost.model import CostModel
from simulator.fluid_bound import fluid_bound
from simulator.regret.rows import RegretReport, RunFigures, Sustained, report_of, rows_of
from simulator.report.report import Slo, summarise
from simulator.reproductions.journal import run_noted
from simulator.reproductions.measurement import (
    System,
    Workload,
    find_sustainable_rate,
    outcomes_at,
    own_req_s,
    requests_of,
)
from simulator.reproductions.parallel import OnDone, run_jobs
from simulator.reproductions.sustainable_rate import RateSearch
from simulator.traces.source import SYNTHETIC, TraceRecipe

LOADS: Final = (0.3, 0.6, 0.8, 0.95)
"""Shares of the rate that the best policy sustains."""
OWN: Final = "own"
KV: Final = {OWN: KvReuseConfig(), "brought": KvReuseConfig(pulls=True, host_factor=4.0)}
"""Ways to get KV: computed where it is not cached, or brought from other instances and the host's memory, too."""
SEEDS, QUICK_SEEDS = 5, 2
INSTANCES, QUICK_INSTANCES = 16, 8
QUICK_POLICIES: Final = (
    "penstock", "lmetric_plus", "lmetric", "simulation", "linear", "filter", "dynamo", "least_loaded",
)  # fmt: skip
FINDERS: Final = ("penstock", "lmetric_plus", "filter")
"""The best of these and LMetric, which has its own search, says what is sustained; with --quick of the first and
LMetric."""


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class SuiteTrace:
    """A trace of the suite, as its loads replay it."""

    name: str
    file: str
    slo: Slo
    clip_s: float
    quick_clip_s: float
    start_scale: float
    """Where the search for the sustainable rate begins, with 16 instances."""
    quick_requests: int
    shared_prefix: float = 0.0
    """Where the trace tells of no prefixes."""
    prefix_groups: int = 64
    block_tokens: int | None = None
    """Of the blocks that the trace names: instances with such blocks share the same prefixes, and a simulation takes a
    tenth of the time."""

    def workload(self, data: Path, *, quick: bool) -> Workload:
        """Its beginning, at its own rate."""
        recipe = TraceRecipe(
            self.file if self.file == SYNTHETIC else str(data / "traces" / self.file),
            clip_end_s=self.quick_clip_s if quick else self.clip_s,
            shared_prefix=self.shared_prefix,
            prefix_groups=self.prefix_groups,
        )
        return Workload(recipe, self.slo, self.quick_requests if quick else None)


TRACES: Final = (
    SuiteTrace(
        "chat",
        "mooncake_conversation.jsonl.gz",
        Slo(ttft_ms=10_000, tpot_ms=100),
        1200,
        400,
        2.0,
        500,
        block_tokens=512,
    ),
    SuiteTrace(
        "agents",
        "agentic_claude_code_A.jsonl.gz",
        Slo(ttft_ms=30_000, tpot_ms=100),
        1800,
        1200,
        0.8,
        600,
        block_tokens=64,
    ),
    SuiteTrace("conversations", SYNTHETIC, Slo(ttft_ms=2000, tpot_ms=100), 3600, 900, 40.0, 2000),
    SuiteTrace("short answers", "azure2023_code.csv.gz", Slo(ttft_ms=2000, tpot_ms=100), 3600, 900, 40.0, 1200, 0.6),
    SuiteTrace("short prompts", "azure2023_conv.csv.gz", Slo(ttft_ms=3000, tpot_ms=100), 1800, 300, 45.0, 800, 0.5),
    SuiteTrace("no prefixes", "azure2023_conv.csv.gz", Slo(ttft_ms=3000, tpot_ms=100), 1800, 240, 12.0, 1200),
    SuiteTrace("reasoning", "servegen_deepseek-r1.jsonl.gz", Slo(ttft_ms=10_000, tpot_ms=100), 300, 60, 8.0, 800),
    SuiteTrace("m-large", "servegen_m-large.jsonl.gz", Slo(ttft_ms=2000, tpot_ms=100), 300, 30, 0.8, 1200),
    SuiteTrace("m-small", "servegen_m-small.jsonl.gz", Slo(ttft_ms=2000, tpot_ms=100), 120, 20, 2.0, 2000),
)
QUICK_TRACES: Final = ("chat", "agents", "conversations", "short answers")


@dataclass(frozen=True, slots=True)
class OwnTrace:
    """A trace of the user's, which takes the place of the suite's."""

    name: str
    """Tells it from others in a journal, clips and all."""
    whole: Workload
    start_scale: float
    """As of `SuiteTrace`."""
    block_tokens: int | None
    """As of `SuiteTrace`."""

    def workload(self, data: Path, *, quick: bool) -> Workload:
        """Alike in a quick suite and a whole one, wherever the data are."""
        return self.whole


def own_trace(name: str, workload: Workload, cluster: ClusterConfig, cost: CostModel) -> OwnTrace:
    """The search for its sustainable rate begins at half of what no schedule could exceed. Raises `TraceError` for a
    trace that cannot be read, `ConfigurationError` for one without two requests that come one after the other."""
    system = System(cluster, cost, LMetric.name)
    requests = requests_of(workload, system)
    own_rate = own_req_s(workload, system) if requests else 0.0
    if not own_rate:
        raise ConfigurationError(f"{name} has too few requests for a rate: at least two, at different times")
    start_scale = fluid_bound(requests, cluster, cost).requests_per_s / own_rate / 2
    blocks = {request.block_tokens for request in requests}
    return OwnTrace(
        name, workload, start_scale * INSTANCES / cluster.instances, blocks.pop() if len(blocks) == 1 else None
    )


def with_blocks_of(trace: "SuiteTrace | OwnTrace", cluster: ClusterConfig) -> ClusterConfig:
    """The cluster with instances that have the trace's block size, and as many bytes of KV; as it is where
    a block of the trace is not several of the instances'."""
    instance = cluster.instance
    tokens = trace.block_tokens or instance.block_tokens
    factor = tokens // instance.block_tokens
    if (
        factor <= 1
        or tokens % instance.block_tokens
        or cluster.specs
        or instance.kv_blocks // factor * factor * instance.block_tokens < instance.max_model_len_tokens
    ):
        return cluster
    blocks = replace(
        instance,
        block_tokens=factor * instance.block_tokens,
        kv_blocks=instance.kv_blocks // factor,
        block_bytes=factor * instance.block_bytes,
    )
    return replace(cluster, instance=blocks)


@dataclass(frozen=True, slots=True)
class RegretSuite:
    """What is run."""

    data: Path
    cluster: ClusterConfig
    cost: CostModel
    policies: tuple[str, ...]
    seeds: int
    quick: bool
    processes: int
    on_done: OnDone | None = None
    only: tuple[str, ...] = ()
    """Names of traces; empty: all."""
    kv: tuple[str, ...] = tuple(KV)
    journal: Path | None = None
    """Results are added to this file as they come, and those that it has of a suite with the same instances, costs and
    length are not run again: a suite takes hours."""
    own: OwnTrace | None = None
    """In place of all traces of the suite."""

    def traces(self) -> Sequence[SuiteTrace | OwnTrace]:
        """The user's own, or those that the data folder has. Raises `ConfigurationError` for a folder without any, and
        for a trace that there is not."""
        if self.own is not None:
            return [self.own]
        unknown = set(self.only) - {trace.name for trace in TRACES}
        if unknown:
            known = ", ".join(trace.name for trace in TRACES)
            raise ConfigurationError(f"the suite has no trace {', '.join(sorted(unknown))}; it has {known}")
        there = [
            trace
            for trace in TRACES
            if trace.file == SYNTHETIC or (self.data / "traces" / trace.file).is_file()
            if (trace.name in self.only if self.only else not self.quick or trace.name in QUICK_TRACES)
        ]
        if all(trace.file == SYNTHETIC for trace in there) and not self.only:
            raise ConfigurationError(f"{self.data} has none of the traces of the suite; give its folder with --data")
        return there

    def run(self) -> RegretReport:
        """Find what is sustained of each trace, then run everything at each share of it."""
        traces = self.traces()
        plain = self._plain()
        searches: dict[str, Callable[[], Sustained]] = {
            _search_name(trace, kv, policies): partial(sustained_rate, plain, trace, kv, policies)
            for trace in traces
            for kv, policies in [*((kv, self._finders()) for kv in self.kv), (OWN, (LMetric.name,))]
        }
        sustained = self._run(searches)
        # Seed by seed, so that what has been run when somebody stops is of all traces.
        full = {
            (trace.name, kv): max(
                (
                    sustained[_search_name(trace, kv, self._finders())],
                    # With its own KV: what is sustained so is sustained with KV brought.
                    sustained[_search_name(trace, OWN, (LMetric.name,))],
                ),
                key=lambda found: found.scale,
            )
            for trace in traces
            for kv in self.kv
        }
        jobs: dict[str, Callable[[], RunFigures]] = {
            _job_name(trace, kv, load, policy, seed): partial(
                run_once, plain, trace, kv, full[trace.name, kv].scale * load, policy, seed
            )
            for seed in range(self.seeds)
            for trace in traces
            for kv in self.kv
            for load in LOADS
            for policy in self.policies
        }
        results = self._run(jobs)
        rows = [
            row
            for trace in traces
            for kv in self.kv
            for load in LOADS
            for row in rows_of(trace.name, load, self._figures(results, trace, kv, load), kv)
        ]
        rates = {
            trace.name: {kv: full[trace.name, kv].req_s for kv in self.kv}
            | {LMetric.name: sustained[_search_name(trace, OWN, (LMetric.name,))].req_s}
            for trace in traces
        }
        bounds = self._run({_bound_name(trace): partial(bounds_of, plain, trace) for trace in traces})
        of_trace = {trace.name: bounds[_bound_name(trace)] for trace in traces}
        return report_of(rows, rates, of_trace, seeds=self.seeds, instances=self.cluster.instances, quick=self.quick)

    def cluster_for(self, trace: SuiteTrace | OwnTrace, kv: str) -> ClusterConfig:
        """The cluster for a trace, whose instances get KV in one of the ways of `KV`."""
        return replace(with_blocks_of(trace, self.cluster), kv_reuse=KV[kv])

    def fingerprint(self) -> str:
        """Of all that the same job has the same result with: what a result in a journal is told by."""
        alike = (self.cluster, self.cost, self.quick)
        return hashlib.sha256(pickle.dumps(alike if self.own is None else (*alike, self.own))).hexdigest()[:16]

    def _run(self, jobs: Mapping[str, Callable[[], Result]]) -> dict[str, Result]:
        if self.journal is None:
            return run_jobs(jobs, self.processes, self.on_done)
        fingerprint = self.fingerprint()
        return run_noted(jobs, self.processes, self.on_done, self.journal, lambda _: fingerprint)

    def _figures(
        self, results: Mapping[str, RunFigures], trace: SuiteTrace | OwnTrace, kv: str, load: float
    ) -> dict[str, Sequence[RunFigures]]:
        return {
            policy: [results[_job_name(trace, kv, load, policy, seed)] for seed in range(self.seeds)]
            for policy in self.policies
        }

    def _finders(self) -> tuple[str, ...]:
        return FINDERS[:1] if self.quick else FINDERS

    def _plain(self) -> "RegretSuite":
        """Without what cannot travel to another process."""
        return replace(self, on_done=None)


def policies_of(quick: bool) -> tuple[str, ...]:
    """Who takes part unless somebody says otherwise."""
    return QUICK_POLICIES if quick else tuple(POLICIES.usable())


def sustained_rate(suite: RegretSuite, trace: SuiteTrace | OwnTrace, kv: str, policies: Sequence[str]) -> Sustained:
    """The highest rate of the trace that the best of the policies sustains."""
    workload = trace.workload(suite.data, quick=suite.quick)
    best = Sustained(0.0, 0.0)
    start = trace.start_scale * suite.cluster.instances / INSTANCES
    for policy in policies:
        search = RateSearch(
            best.scale or start,
            lowest_scale=start / 64,
            highest_scale=64 * start,
            growth=1.1 if best.scale else 1.5,
            tolerance=0.15 if suite.quick else 0.03,
        )
        load = find_sustainable_rate(System(suite.cluster_for(trace, kv), suite.cost, policy), workload, search)
        if load.found.scale is not None and load.found.scale > best.scale:
            best = Sustained(load.found.scale, load.req_s or 0.0)
    if not best.scale:
        raise ConfigurationError(f"not even a 64th of {start:g} times the rate of {trace.name!r} is sustained")
    return best


def bounds_of(suite: RegretSuite, trace: SuiteTrace | OwnTrace) -> dict[str, float]:
    """Rates of the trace that no schedule could exceed, by the way to get KV, and with infinite caches."""
    workload = trace.workload(suite.data, quick=suite.quick)
    cluster = suite.cluster_for(trace, OWN)
    requests = requests_of(workload, System(cluster, suite.cost, LMetric.name))
    infinite = fluid_bound(requests, cluster, suite.cost).requests_per_s
    finite = {kv: cache_bound(requests, suite.cluster_for(trace, kv), suite.cost).requests_per_s for kv in suite.kv}
    return {**finite, "infinite": infinite}


def run_once(
    suite: RegretSuite, trace: SuiteTrace | OwnTrace, kv: str, scale: float, policy: str, seed: int
) -> RunFigures:
    """One simulation. Seeds change what is drawn of a trace, and when instances report."""
    workload = trace.workload(suite.data, quick=suite.quick)
    workload = replace(workload, recipe=replace(workload.recipe, seed=seed))
    system = System(replace(suite.cluster_for(trace, kv), seed=seed), suite.cost, policy)
    report = summarise(outcomes_at(system, workload, scale), workload.slo, policy=policy, seed=seed)
    return RunFigures(
        report.ttft_ms.mean or 0.0,
        report.ttft_ms.p95 or 0.0,
        report.tpot_ms.mean or 0.0,
        report.tpot_ms.p95 or 0.0,
        report.e2e_ms.mean or 0.0,
        report.goodput_req_s,
    )


def _search_name(trace: SuiteTrace | OwnTrace, kv: str, policies: Sequence[str]) -> str:
    return f"{trace.name}, KV {kv}: what {', '.join(policies)} sustain"


def _bound_name(trace: SuiteTrace | OwnTrace) -> str:
    return f"{trace.name}: what no schedule exceeds"


def _job_name(trace: SuiteTrace | OwnTrace, kv: str, load: float, policy: str, seed: int) -> str:
    return f"{trace.name}, KV {kv}, at {load:g}: {policy}, seed {seed}"
