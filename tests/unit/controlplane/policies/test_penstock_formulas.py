"""Penstock's scores over columns are those of its formulas, written for one instance after the other."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from controlplane.model.cluster import ClusterTable
from controlplane.model.instance import LoadReport
from controlplane.model.kv_costs import KvCosts
from controlplane.model.placement import PlacementProblem
from controlplane.model.step_costs import DATASHEET_COSTS, StepCosts
from controlplane.policies.penstock import Penstock
from tests.unit.controlplane.builders import cluster, report, request
from tests.unit.controlplane.policies.problems import LONG

STEP_COSTS = [DATASHEET_COSTS, StepCosts(20.0, 0.3, 0.0, 1e-4, 0.0), StepCosts(5.0, 0.01, 1.0, 0.0, 1e-5)]
KV_COSTS = [KvCosts(), KvCosts(2.0, 0.01, 1.0, 0.005), KvCosts(1.0, 0.05), KvCosts(load_token_ms=0.02)]
LEAST_BROUGHT_TOKENS, MOST_AWAITED_MS = 128, 4000
STEP_TOKENS, KV_TOKENS = 2048, 16_000
"""Of the builders' instances."""
LOADS = st.builds(
    LoadReport,
    running_requests=st.integers(0, 90),
    queued_requests=st.integers(0, 9),
    queued_prefill_tokens=st.integers(0, 9000),
    running_tokens=st.integers(0, 20_000),
)
TOKENS = st.sampled_from([0, 0, 128, 512, 1024])
COMES_MS = st.sampled_from([0.0, 0.0, 20.0, 300.0, 5000.0])


@dataclass(frozen=True)
class Case:
    """One instance, and what it has of the prompt."""

    load: LoadReport
    costs: StepCosts
    kv: KvCosts
    held: int
    comes: int
    comes_ms: float
    """When it was placed it was thought to take so long from now on; 0: it should be there."""
    host: int


@st.composite
def cases(draw: st.DrawFn) -> list[Case]:
    """Instances that are alike, or not."""
    alike = draw(st.booleans())
    costs = st.just(draw(st.sampled_from(STEP_COSTS))) if alike else st.sampled_from(STEP_COSTS)
    kv = st.just(draw(st.sampled_from(KV_COSTS))) if alike else st.sampled_from(KV_COSTS)
    return draw(st.lists(st.builds(Case, LOADS, costs, kv, TOKENS, TOKENS, COMES_MS, TOKENS), min_size=1, max_size=6))


def problem_of(instances: Sequence[Case], prompt_tokens: int, max_tokens: int, *, has_hosts: bool) -> PlacementProblem:
    ids = [f"i{row}" for row in range(len(instances))]
    table: ClusterTable = cluster(*ids)
    for instance_id, case in zip(ids, instances, strict=True):
        table.costed(instance_id, "1", case.costs)
        table.kv_costed(instance_id, "1", case.kv)
        report(table, instance_id, case.load)
    snapshot = table.snapshot("m")
    assert snapshot is not None
    held = np.array([case.held for case in instances])
    cached = np.maximum(held, [case.comes for case in instances])
    host = np.maximum(held, [case.host for case in instances]) if has_hosts else None
    wanted = replace(request(prompt_tokens=prompt_tokens, blocks=LONG), max_tokens=max_tokens)
    comes_ms = np.array([case.comes_ms if case.comes > case.held else 0.0 for case in instances])
    return PlacementProblem(
        wanted,
        snapshot,
        cached,
        snapshot.placeable,
        held_tokens=held,
        comes_ms=comes_ms if (cached > held).any() else None,
        host_tokens=host,
    )


@dataclass(frozen=True)
class Source:
    """Whom a prefix may be pulled from."""

    row: int
    tokens: int
    comes_ms: float = 0.0
    loads_tokens: int = 0


def sources_of(problem: PlacementProblem, instances: Sequence[Case]) -> list[Source]:
    """Nothing has been pulled before: the first of the longest, the first that is going to have more, and the first
    whose host has more."""
    found = []
    held = [case.held if case.kv.pull_token_ms is not None else 0 for case in instances]
    if max(held) >= LEAST_BROUGHT_TOKENS and held.count(max(held)) < len(held):
        found.append(Source(held.index(max(held)), max(held)))
    comes = [max(case.held, case.comes) for case in instances]
    row = comes.index(max(comes))
    wait = comes_of(instances[row]) or wait_of(instances[row])
    has_room = instances[row].load.running_tokens + instances[row].load.queued_prefill_tokens <= KV_TOKENS
    is_longer = comes[row] >= max(case.held for case in instances) + LEAST_BROUGHT_TOKENS
    if is_longer and instances[row].kv.pull_token_ms is not None and has_room and 0 < wait <= MOST_AWAITED_MS:
        found.append(Source(row, comes[row], wait))
    if problem.host_tokens is not None:
        hosts = [int(tokens) for tokens in problem.host_tokens]
        row = hosts.index(max(hosts))
        kv, missing = instances[row].kv, hosts[row] - instances[row].held
        is_longer = hosts[row] >= max(case.held for case in instances) + LEAST_BROUGHT_TOKENS
        if is_longer and min(hosts) < hosts[row] and None not in (kv.pull_token_ms, kv.load_token_ms):
            found.append(Source(row, hosts[row], kv.load_fixed_ms + kv.load_token_ms * missing, missing))
    return found


def own_token_of(case: Case) -> float:
    load, costs = case.load, case.costs
    beside = (
        costs.context_token_ms * load.running_tokens + costs.decode_request_ms * load.running_requests + costs.fixed_ms
    )
    return beside / max(STEP_TOKENS - load.running_requests, 64) + costs.prefill_token_ms


def wait_of(case: Case) -> float:
    return case.load.queued_prefill_tokens * own_token_of(case)


def comes_of(case: Case) -> float:
    return case.comes_ms if case.comes > case.held else 0.0


def plain(problem: PlacementProblem, case: Case, row: int, sources: Sequence[Source]) -> tuple[float, Source | None]:
    """The score, and whom the prefix is pulled from."""
    load, costs, kv = case.load, case.costs, case.kv
    prompt_tokens, cached = problem.request.prompt_tokens, int(problem.cached_tokens[row])
    batch = load.running_requests + load.queued_requests
    token = (costs.fixed_ms / STEP_TOKENS + costs.prefill_token_ms) * batch + own_token_of(case)
    wait = max(wait_of(case), comes_of(case))

    def prefill(begin: float, new: float) -> float:
        mean_pairs = prompt_tokens + 0.5 - 0.5 * new
        return begin + new * (token + mean_pairs * ((batch + 1) * costs.attended_pair_ms))

    new = max(prompt_tokens - cached, 1)
    totals = [prefill(wait, new)]
    if problem.host_tokens is not None and kv.load_token_ms is not None:
        brought = int(problem.host_tokens[row]) - cached
        if brought >= LEAST_BROUGHT_TOKENS:
            begin = max(wait, brought * kv.load_token_ms + kv.load_fixed_ms)
            totals.append(prefill(begin, max(prompt_tokens - int(problem.host_tokens[row]), 1)))
    pulled_from: Source | None = None
    for source in sources:
        brought = source.tokens - cached
        if brought >= LEAST_BROUGHT_TOKENS and kv.pull_token_ms is not None:
            pull_ms = (
                source.tokens * kv.pull_token_ms + (kv.pull_fixed_ms + source.comes_ms) - cached * kv.pull_token_ms
            )
            begin = max(wait, pull_ms)
            pulled = prefill(begin, max(prompt_tokens - source.tokens, 1))
            pulled_from = source if pulled < min(totals) else pulled_from
            totals.append(pulled)
    answer = 0.0 if problem.request.max_tokens == 1 else problem.snapshot.answer_tokens
    held = load.running_tokens + load.queued_prefill_tokens
    other = (costs.context_token_ms * prompt_tokens + costs.decode_request_ms) * answer
    decode = (costs.context_token_ms * answer) * held + (costs.decode_request_ms * answer) * batch
    decode += (costs.fixed_ms + costs.decode_request_ms + costs.context_token_ms * prompt_tokens) * answer
    decode += other * batch
    decode += max(held + prompt_tokens - KV_TOKENS, 0) * costs.prefill_token_ms * (batch + 1)
    displaced = 0.0
    if problem.host_tokens is not None and kv.load_token_ms is not None:
        displaced = new * kv.load_token_ms
    return (min(totals) + displaced) + decode, pulled_from


@given(cases(), st.integers(1, 4000), st.sampled_from([0, 1]), st.booleans())
def test_scores_are_the_formulas_to_the_last_digit(
    instances: list[Case], prompt_tokens: int, max_tokens: int, has_hosts: bool
) -> None:
    problem = problem_of(instances, prompt_tokens, max_tokens, has_hosts=has_hosts)
    decision = Penstock().decide(problem)
    sources = sources_of(problem, instances)
    expected = [plain(problem, case, row, sources) for row, case in enumerate(instances)]
    assert decision.scores.tolist() == [score for score, _ in expected]
    assert decision.scores[decision.row] == min(score for score, _ in expected)
    source = expected[decision.row][1] or Source(-1, 0)
    pulled = (decision.pull_row, decision.pull_tokens, decision.pull_comes_ms, decision.pull_loads_tokens)
    assert pulled == (source.row, source.tokens, source.comes_ms, source.loads_tokens)


@given(cases(), st.integers(1, 4000), st.booleans())
def test_what_explain_shows_adds_up(instances: list[Case], prompt_tokens: int, has_hosts: bool) -> None:
    decision = Penstock().decide(problem_of(instances, prompt_tokens, 0, has_hosts=has_hosts))
    parts = decision.indicators
    total = sum(parts[name] for name in ("wait_ms", "prefill_ms", "decode_ms", "others_ms"))
    assert np.abs(np.asarray(total) - decision.scores).max() <= 4, "of which each is cut to whole milliseconds"
    ways = [
        parts[name]
        for name in ("if_computed_ms", "if_loaded_ms", "if_pulled_ms", "if_awaited_ms", "if_pulled_from_host_ms")
        if name in parts
    ]
    if ways:
        cheapest = np.min([np.where(way < 0, np.inf, way) for way in ways], axis=0)
        assert np.abs(cheapest - decision.scores).max() <= 1
