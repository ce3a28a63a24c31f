"""A move is made where it saves everybody more than it takes, and never undone."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from controlplane.model.migration_order import MigrationOrder
from controlplane.model.running_request import RunningRequest
from controlplane.model.step_costs import StepCosts
from controlplane.policies.rescheduling.decode_load import decode_load
from controlplane.policies.rescheduling.everybodys_time import EverybodysTime
from controlplane.policies.rescheduling.parameters import ReschedulerParameters
from controlplane.policies.rescheduling.problem import DecodeInstance, Idle
from controlplane.policies.rescheduling.rescheduler import UNKNOWN_STEPS
from controlplane.policies.rescheduling.trajectories import SHARES, SPANS, Spans, of_instances, of_requests
from controlplane.policies.rescheduling.trajectory_planner import TrajectoryPlanner
from tests.examples import examples

COSTS = StepCosts(fixed_ms=10.0, prefill_token_ms=0.1, decode_request_ms=0.5, context_token_ms=0.01)
PARAMETERS = ReschedulerParameters(migration_fixed_ms=20.0, floor_ms=50.0)

Request = tuple[int, int, tuple[int, int] | None]
"""Context, what remains, and the 10 and 90 % quantiles of it."""


def instance(name: str, *requests: Request, capacity: int = 100_000, receives: bool = True) -> DecodeInstance:
    running = [
        RunningRequest(f"{name}{number}", context, 0, left, f"f{number}", band)
        for number, (context, left, band) in enumerate(requests)
    ]
    load = decode_load(running, PARAMETERS.horizon)
    return DecodeInstance(name, capacity, 20.0, receives, load, COSTS)


def certain(*requests: tuple[int, int]) -> list[Request]:
    return [(context, left, None) for context, left in requests]


def after(cluster: Sequence[DecodeInstance], order: MigrationOrder) -> list[DecodeInstance]:
    """Where everybody is once the order is carried out."""
    (source,) = [each for each in cluster if each.instance_id == order.source_instance_id]
    at = source.load.request_ids.index(order.request_id)
    return [_with(each, source, at, order) for each in cluster]


def _with(each: DecodeInstance, source: DecodeInstance, at: int, order: MigrationOrder) -> DecodeInstance:
    def running(load_of: DecodeInstance) -> list[RunningRequest]:
        load, bands = load_of.load, load_of.load.band_tokens
        return [
            RunningRequest(
                request_id,
                int(load.context_tokens[row]),
                0,
                int(load.remaining_tokens[row]),
                load.frontends[row],
                None if bands is None else (int(bands[0, row]), int(bands[1, row])),
            )
            for row, request_id in enumerate(load.request_ids)
        ]

    requests = running(each)
    if each is source:
        del requests[at]
    elif each.instance_id == order.target_instance_id:
        requests.append(running(source)[at])
    return replace(each, load=decode_load(requests, PARAMETERS.horizon))


requests_strategy = st.lists(
    st.tuples(
        st.integers(1, 3000), st.integers(0, 3000), st.none() | st.tuples(st.integers(0, 900), st.integers(0, 9000))
    ),
    max_size=6,
)


@st.composite
def clusters(draw: st.DrawFn) -> list[DecodeInstance]:
    return [
        instance(name, *draw(requests_strategy), capacity=draw(st.integers(500, 20_000)), receives=draw(st.booleans()))
        for name in draw(st.sampled_from(["ab", "abc", "abcd"]))
    ]


@settings(max_examples=examples(150), deadline=None)
@given(clusters(), st.sampled_from([0.0, 50.0]), st.integers(1, 2))
def test_no_sequence_of_moves_comes_back_to_where_it_began(
    cluster: list[DecodeInstance], floor_ms: float, most: int
) -> None:
    """Nothing forbids a request to return here: that it is worth nothing suffices."""
    planner = TrajectoryPlanner(ReschedulerParameters(migration_fixed_ms=1.0, floor_ms=floor_ms, migrations=most))
    seen = set()
    while True:
        homes = frozenset((request, each.instance_id) for each in cluster for request in each.load.request_ids)
        assert homes not in seen
        seen.add(homes)
        decided = planner.decide(cluster)
        assert all(gain >= floor_ms for gain in decided.gains)
        assert (decided.idle is None) == bool(decided.orders)
        if not decided.orders:
            return
        for order in decided.orders:
            cluster = after(cluster, order)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(100, 5000)), min_size=1, max_size=6))
def test_everybodys_time_is_that_of_all_steps_one_by_one(requests: list[tuple[int, int]]) -> None:
    spans = Spans.until(max(left for _, left in requests), foresight_steps=1e9)
    context = np.array([each for each, _ in requests])
    ends = np.array([[left] * 3 for _, left in requests], dtype=np.float64)
    own = of_requests(context, ends, spans)
    load = own[np.array([0])]
    for row in range(1, len(requests)):
        load = load + own[np.array([row])]
    time = EverybodysTime.of([instance("a", capacity=10**9)], 1.0)
    naive = 0.0
    for step in range(max(left for _, left in requests)):
        here = [context + step + 0.5 for context, left in requests if step < left]
        naive += len(here) * (COSTS.fixed_ms + COSTS.decode_request_ms * len(here) + COSTS.context_token_ms * sum(here))
    assert time.of_load(load, spans).total_ms[0] == pytest.approx(naive, rel=0.1)


Load = tuple[float, float, float]
"""Requests, tokens and the variance of the tokens, in one span."""


class OneByOne:
    """What moves are worth, without arrays: request by request and span by span."""

    def __init__(self, cluster: Sequence[DecodeInstance], parameters: ReschedulerParameters) -> None:
        self.parameters = parameters
        self.requests = {
            (each.instance_id, request_id): (int(each.load.context_tokens[row]), self._ends(each, row))
            for each in cluster
            for row, request_id in enumerate(each.load.request_ids)
        }
        self.spans = Spans.until(max([1, *(ends[2] for _, ends in self.requests.values())]), parameters.foresight_steps)
        self.own = {
            name: [self._own(*request, span) for span in range(SPANS)] for name, request in self.requests.items()
        }
        sums = {
            each.instance_id: [
                _sum(own[span] for (home, _), own in self.own.items() if home == each.instance_id)
                for span in range(SPANS)
            ]
            for each in cluster
        }
        mean = [_sum(of_one[span] for of_one in sums.values()) for span in range(SPANS)]
        lost = [tuple(max(mean[0][at] - now[at], 0.0) / len(cluster) for at in (0, 1)) for now in mean]
        self.loads = {
            name: [(now[0] + gone[0], now[1] + gone[1], now[2]) for now, gone in zip(of_one, lost, strict=True)]
            for name, of_one in sums.items()
        }

    @staticmethod
    def _ends(instance: DecodeInstance, row: int) -> tuple[float, float, float]:
        left, bands = int(instance.load.remaining_tokens[row]), instance.load.band_tokens
        low, high = (left, left) if bands is None else bands[:, row].tolist()
        return min(low, left), left, max(high, left)

    def _own(self, context: int, ends: tuple[float, float, float], span: int) -> Load:
        low, high = self.spans.edges[span : span + 2].tolist()
        until = [min(max((max(end, self.spans.edges[1]) - low) / (high - low), 0.0), 1.0) for end in ends]
        there = sum(share * each for share, each in zip(SHARES.tolist(), until, strict=True))
        length = context + (low + high) / 2
        return there, length * there, length**2 * there * (1 - there)

    def time(self, instance: DecodeInstance, load: Sequence[Load]) -> tuple[float, float]:
        """Of all who are there, in all and in one step of the first span."""
        total, anew, of_step, foresight = 0.0, 0.0, [], self.spans.foresight_steps
        for span, (requests, tokens, variance) in enumerate(load):
            scale = max(1.0, math.sqrt(3 * variance) / math.pi)
            above = (tokens - instance.capacity_tokens * self.parameters.memory_fraction) / scale
            excess = scale * (max(above, 0.0) + math.log1p(math.exp(-abs(above))))
            context = max(tokens, 1.0) / max(requests, 1e-3)
            of_step.append((requests + excess / context) * step_ms(requests, tokens))
            low, high = self.spans.edges[span : span + 2].tolist()
            total += of_step[-1] * foresight * (math.exp(-low / foresight) - math.exp(-high / foresight))
            computed_ms = COSTS.prefill_token_ms + COSTS.attended_pair_ms / 2 * context
            anew = max(anew, math.exp(-(low + high) / 2 / foresight) * excess * computed_ms * (requests + 1))
        return total + anew, of_step[0]

    def worth(self, source: DecodeInstance, request_id: str, target: DecodeInstance) -> float:
        """Of a move, in ms; minus infinity if it is not open."""
        name = (source.instance_id, request_id)
        (context, ends), own = self.requests[name], self.own[name]
        cost = self.parameters.migration_fixed_ms + self.parameters.migration_token_us / 1000 * context
        at_source, at_target = self.loads[source.instance_id], self.loads[target.instance_id]
        steps = cost / step_ms(*at_source[0][:2])
        present = int(target.load.context_tokens.sum())
        is_ended = sum(share * end for share, end in zip(SHARES.tolist(), ends, strict=True)) <= steps
        no_room = context > target.capacity_tokens * self.parameters.memory_fraction - present
        if is_ended or no_room or source is target or not target.may_receive:
            return -math.inf
        without = [(a - x, b - y, max(c - z, 0.0)) for (a, b, c), (x, y, z) in zip(at_source, own, strict=True)]
        beside = [_sum(pair) for pair in zip(at_target, own, strict=True)]
        relief = [was - now for was, now in zip(self.time(source, at_source), self.time(source, without), strict=True)]
        burden = [now - was for was, now in zip(self.time(target, at_target), self.time(target, beside), strict=True)]
        return relief[0] - burden[0] - max(relief[1] - burden[1], 0.0) * steps - cost


def step_ms(requests: float, tokens: float) -> float:
    return COSTS.fixed_ms + COSTS.decode_request_ms * requests + COSTS.context_token_ms * tokens


def _sum(loads: Iterable[Load]) -> Load:
    requests = tokens = variance = 0.0
    for load in loads:
        requests, tokens, variance = requests + load[0], tokens + load[1], variance + load[2]
    return requests, tokens, variance


@settings(max_examples=examples(60), deadline=None)
@given(clusters(), st.sampled_from([1.0, 50.0]))
def test_of_all_moves_weighed_one_by_one_it_makes_the_best(cluster: list[DecodeInstance], floor_ms: float) -> None:
    parameters = ReschedulerParameters(migration_fixed_ms=1.0, floor_ms=floor_ms)
    naive = OneByOne(cluster, parameters)
    worth = {
        (request_id, target.instance_id): naive.worth(source, request_id, target)
        for source in cluster
        for request_id in source.load.request_ids
        for target in cluster
    }
    best = max(worth.values(), default=-math.inf)
    assume(abs(best - floor_ms) > 1e-6)
    decided = TrajectoryPlanner(parameters).decide(cluster)
    assert len(decided.orders) == (best > floor_ms)
    for order, gain in zip(decided.orders, decided.gains, strict=True):
        assert gain == pytest.approx(best, rel=1e-6, abs=1e-6)
        assert worth[order.request_id, order.target_instance_id] == pytest.approx(best, rel=1e-6, abs=1e-6)


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.integers(0, 20), max_size=30), st.integers(21, 40))
def test_instances_looked_at_in_blocks_have_the_sums_of_their_requests(homes: list[int], instances: int) -> None:
    rng = np.random.default_rng(len(homes))
    at, context = np.sort(np.array(homes, dtype=np.intp)), rng.integers(1, 5000, len(homes))
    ends, spans = np.sort(rng.uniform(0, 3000, (len(homes), 3)), axis=1), Spans.until(3000, 1000.0)
    own, loads = of_requests(context, ends, spans), of_instances(context, ends, at, instances, spans)
    for one in range(instances):
        here = own[np.flatnonzero(at == one)]
        assert loads.variance[one] == pytest.approx(here.variance.sum(axis=0))
        lost = np.maximum(own.tokens.sum(axis=0)[0] - own.tokens.sum(axis=0), 0.0) / instances
        assert loads.tokens[one] == pytest.approx(here.tokens.sum(axis=0) + lost)


def test_it_says_what_a_move_saves_and_costs() -> None:
    cluster = [instance("a", *certain((4000, 2000), (4000, 2000), (900, 2000))), instance("b")]
    (order,), (gain,) = (decided := TrajectoryPlanner(PARAMETERS).decide(cluster)).orders, decided.gains
    assert order.target_instance_id == "b"
    saved, cost = (float(part.split()[-2]) for part in order.reason.split(","))
    assert order.reason == f"trajectories: moves to b: saves {saved:.0f} ms, costs {cost:.0f} ms"
    assert saved - cost == pytest.approx(gain, abs=1.0)
    assert cost == pytest.approx(20 + 0.02 * cluster[0].load.context_tokens[int(order.request_id[1])], abs=0.5)


def test_a_move_below_the_floor_is_not_made() -> None:
    cluster = [instance("a", *certain((100, 40), (100, 40))), instance("b")]
    gain = TrajectoryPlanner(ReschedulerParameters(migration_fixed_ms=1.0, floor_ms=0)).decide(cluster).gains[0]
    for floor_ms, idle in ((gain - 0.1, None), (gain + 0.1, Idle.NOT_WORTH_IT)):
        parameters = ReschedulerParameters(migration_fixed_ms=1.0, floor_ms=floor_ms)
        assert TrajectoryPlanner(parameters).decide(cluster).idle is idle


def test_who_ends_while_it_moves_stays() -> None:
    """20 ms and 20 us a token: of three steps of some 28 ms the transfer of 4,000 tokens takes four."""
    for left, moves in ((3, False), (400, True)):
        cluster = [instance("a", *certain((4000, left), (4000, left))), instance("b")]
        parameters = ReschedulerParameters(migration_fixed_ms=200.0, floor_ms=0)
        assert bool(TrajectoryPlanner(parameters).decide(cluster).orders) == moves


FREE = StepCosts(fixed_ms=10.0, prefill_token_ms=0.1, decode_request_ms=0.0, context_token_ms=0.0, attended_pair_ms=0.0)


def crowded(*requests: Request) -> list[DecodeInstance]:
    """Steps take the same whatever is in them: only memory counts."""
    pair = (instance("a", *requests, capacity=1000), instance("b", capacity=1000))
    return [replace(each, costs=FREE) for each in pair]


def test_memory_that_would_run_out_is_made_room_in_before_it_does() -> None:
    planner = TrajectoryPlanner(PARAMETERS)
    assert planner.decide(crowded(*certain((300, 100), (300, 100)))).orders == ()
    (order,) = planner.decide(crowded(*certain((300, 300), (300, 300)))).orders
    assert order.source_instance_id == "a"


def test_what_is_uncertain_counts_by_its_probability() -> None:
    """Both are as likely as not to fit, and may not."""
    planner = TrajectoryPlanner(PARAMETERS)
    surely = planner.decide(crowded((300, 100, (100, 100)), (300, 100, (100, 100))))
    perhaps = planner.decide(crowded((300, 100, (50, 600)), (300, 100, (50, 600))))
    assert (len(surely.orders), len(perhaps.orders)) == (0, 1)


def test_no_target_takes_what_it_has_no_room_for() -> None:
    full = instance("b", *certain((900, 5)), capacity=1000)
    cluster = [instance("a", *certain((400, 900), (400, 900))), full]
    decided = TrajectoryPlanner(PARAMETERS).decide(cluster, held=["b0"])
    assert (decided.orders, decided.idle) == ((), Idle.NO_ROOM)


def test_who_may_not_move_or_be_moved_to_does_not() -> None:
    requests = certain((4000, 2000), (4100, 2000), (4200, 2000))
    cluster = [instance("a", *requests), instance("b")]
    planner = TrajectoryPlanner(PARAMETERS)
    under_way = MigrationOrder("a2", "a", "b", "")
    (order,) = planner.decide(cluster).orders
    assert order.request_id == "a2"
    (order,) = planner.decide(cluster, held=["a2"]).orders
    assert order.request_id == "a1"
    (order,) = planner.decide(cluster, unreachable={"f2": frozenset("b"), "f1": frozenset("b")}).orders
    assert order.request_id == "a0"
    (order,) = planner.decide(cluster, left={"a2": frozenset("b")}).orders
    assert order.request_id == "a1"
    decided = planner.decide(cluster, moving=[under_way])
    assert all(each.request_id != "a2" for each in decided.orders)
    assert decided.balance == planner.decide(after(cluster, under_way), held=["a2"]).balance, "it counts at its target"
    closed = [cluster[0], instance("b", receives=False)]
    assert planner.decide(closed).idle is Idle.NO_ROOM, "only its own instance may receive"
    assert planner.decide([]).balance is None
    assert planner.decide([instance("a"), instance("b")]).idle is Idle.NOT_WORTH_IT


def test_without_a_profile_the_height_of_costs_is_that_of_the_steps() -> None:
    known, unknown = (replace(instance("a", *certain((4000, 99))), costs=costs) for costs in (COSTS, None))
    spans = Spans.until(99, 1000.0)
    load = of_requests(np.array([4000]), np.full((1, 3), 99.0), spans)
    assert EverybodysTime.of([unknown], 1.0).step_ms(load)[0, 0] == pytest.approx(20.0, rel=0.01)
    assert EverybodysTime.of([known], 1.0).step_ms(load)[0, 0] == pytest.approx(10 + 0.5 + 40, rel=0.01)


@settings(max_examples=examples(100), deadline=None)
@given(clusters(), st.integers(1, 3000))
def test_a_request_begins_to_decode_where_no_move_would_be_worth_anything(
    cluster: list[DecodeInstance], context: int
) -> None:
    """Where all have room and cost the same, and all that runs is as long: the same worth chooses both."""
    left = 500
    cluster = [
        instance(
            each.instance_id,
            *certain(*((tokens, left) for tokens in each.load.context_tokens.tolist())),
            capacity=10**9,
        )
        for each in cluster
    ]
    planner = TrajectoryPlanner(ReschedulerParameters(migration_fixed_ms=0.0, migration_token_us=0.0, floor_ms=1e-3))
    costs_ms = planner.joining_ms(cluster, context, np.zeros(len(cluster)))
    chosen = cluster[int(costs_ms.argmin())]
    new = RunningRequest(
        "new", context, 0, left if any(each.load.request_ids for each in cluster) else UNKNOWN_STEPS, ""
    )
    running = [
        RunningRequest(name, int(tokens), 0, left, "")
        for name, tokens in zip(chosen.load.request_ids, chosen.load.context_tokens, strict=True)
    ]
    placed = replace(chosen, load=decode_load([*running, new], PARAMETERS.horizon))
    decided = planner.decide([placed if each is chosen else each for each in cluster])
    assert "new" not in {order.request_id for order in decided.orders}


def test_requests_that_are_on_their_way_count_where_they_go() -> None:
    cluster = [instance("a", *certain((1000, 500))), instance("b", *certain((1000, 500)))]
    costs_ms = TrajectoryPlanner(PARAMETERS).joining_ms(cluster, 1000, np.array([1.0, 0.0]))
    assert costs_ms[1] < costs_ms[0]


def test_what_has_no_room_costs_more_than_longer_steps() -> None:
    full = instance("a", *certain((4500, 2000)), capacity=5000)
    roomy = instance("b", *certain((3000, 2000), (3000, 2000)), capacity=100_000)
    costs_ms = TrajectoryPlanner(PARAMETERS).joining_ms([full, roomy], 1000, np.zeros(2))
    assert costs_ms[1] < costs_ms[0]
