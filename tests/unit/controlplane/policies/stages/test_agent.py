"""Agents of a few instances with a perfect network: requests flow downstream, load evens out, boundaries move."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.model.running_request import RunningRequest
from controlplane.planning.qoe import QoeModel
from controlplane.policies.stages.agent import (
    AgentInstruction,
    BoundaryMoved,
    RoutingMode,
    StageAgent,
    StageParameters,
    ToPeer,
    excess_tokens,
    outgrown,
    relieving,
)
from controlplane.policies.stages.layout import StageLayout
from controlplane.policies.stages.neighbours import MAX_LENGTHS, Neighbours, StageReport
from controlplane.policies.stages.refinement import Refinement, RefinementParameters, RequestLength
from controlplane.protocols.bid_ask.limits import BidAskLimits
from controlplane.protocols.bid_ask.messages import Ask
from controlplane.protocols.bid_ask.receiver import Capacity
from controlplane.protocols.bid_ask.sender import Closed, Migrate

MODEL = QoeModel(8.0, 0.05, 1e-4, 1e-8, 2e-4)
LAYOUT = StageLayout("m", 1, (("a", "b"), ("c", "d")), (1000,))
FROZEN = RefinementParameters(policy=Refinement.FROZEN)


class Mesh:
    """Instances that carry out what their agents say, migrations taking no time."""

    def __init__(self, layout: StageLayout = LAYOUT, parameters: StageParameters | None = None) -> None:
        self.now_ms = 0.0
        self.parameters = parameters or StageParameters(refinement=FROZEN)
        self.running: dict[str, dict[str, RunningRequest]] = {each: {} for each in layout.instance_ids}
        self.agents = {
            each: StageAgent(each, f"{each}0", self.parameters, BidAskLimits()) for each in layout.instance_ids
        }
        self.obstacles: dict[str, str] = {}
        """Why an instance cannot move KV."""
        self.frontends: dict[str, frozenset[str] | None] = dict.fromkeys(layout.instance_ids)
        self.boundaries: dict[str, float] = {}
        self.moves: list[tuple[str, str, str]] = []
        self.closed: list[Closed] = []
        for each, agent in self.agents.items():
            self.do(each, agent.use_layout(layout, MODEL, 0.0))

    def add(self, instance_id: str, *contexts: int) -> None:
        for context in contexts:
            request_id = f"{instance_id}{len(self.running[instance_id])}x{context}"
            self.running[instance_id][request_id] = RunningRequest(request_id, context, context // 2)

    def load(self, instance_id: str) -> int:
        return sum(request.context_tokens for request in self.running[instance_id].values())

    def do(self, instance_id: str, instructions: tuple[AgentInstruction, ...]) -> None:
        for instruction in instructions:
            match instruction:
                case ToPeer(peer, message):
                    agent = self.agents[peer]
                    self.do(peer, agent.receive(instance_id, message, self.capacity(peer), self.now_ms))
                case Migrate(request_id, target):
                    self.moves.append((request_id, instance_id, target))
                    self.running[target][request_id] = self.running[instance_id].pop(request_id)
                    agent = self.agents[instance_id]
                    self.do(instance_id, agent.migration_ended(request_id, True, "", self.now_ms))
                case BoundaryMoved(tokens):
                    self.boundaries[instance_id] = tokens
                case Closed():
                    self.closed.append(instruction)

    def capacity(self, instance_id: str) -> Capacity:
        used = self.load(instance_id)
        return Capacity(used, 100_000 - used, True, self.obstacles.get(instance_id, ""), self.frontends[instance_id])

    def tick(self, times: int = 1, ms: float = 100.0) -> None:
        for _ in range(times):
            self.now_ms += ms
            for each, agent in self.agents.items():
                running = tuple(self.running[each].values())
                self.do(each, agent.tick(self.capacity(each), running, self.now_ms))
                agent.validate()


def test_requests_that_outgrow_the_range_go_to_the_lighter_successor() -> None:
    mesh = Mesh(parameters=StageParameters(refinement=FROZEN, rebalance=False))
    mesh.add("c", 5000)
    mesh.add("a", 300, 1200, 1000)
    mesh.tick(2)
    assert [(source, target) for _, source, target in mesh.moves] == [("a", "d")]
    assert sorted(r.context_tokens for r in mesh.running["a"].values()) == [300, 1000]


def test_who_cannot_move_kv_or_cannot_be_reached_by_the_frontend_is_not_chosen() -> None:
    parameters = StageParameters(refinement=FROZEN, rebalance=False)
    blocked = Mesh(parameters=parameters)
    blocked.obstacles["d"] = "its transfer agent is gone"
    blocked.add("c", 5000)
    blocked.add("a", 1200)
    blocked.tick(2)
    assert [(source, target) for _, source, target in blocked.moves] == [("a", "c")], "although d is lighter"
    blocked.obstacles["a"] = "its transfer agent is gone"
    blocked.add("a", 1300)
    blocked.tick(2)
    assert len(blocked.moves) == 1, "nothing can leave a"

    cut = Mesh(parameters=parameters)
    cut.frontends |= {"c": frozenset({"f"}), "d": frozenset({"g"})}
    cut.add("c", 5000)
    cut.running["a"]["r"] = RunningRequest("r", 1200, 10, frontend_id="f")
    cut.tick(2)
    assert cut.moves == [("r", "a", "c")], "f has no stream to d"


def test_round_robin_hands_off_whatever_the_load() -> None:
    mesh = Mesh(parameters=StageParameters(refinement=FROZEN, routing_mode=RoutingMode.ROUND_ROBIN, rebalance=False))
    mesh.add("c", 50_000)
    mesh.add("a", 1200, 1300, 1400, 1500)
    mesh.tick(5)
    assert sorted(target for _, _, target in mesh.moves) == ["c", "c", "d", "d"]


def test_a_request_far_out_of_range_goes_to_the_stage_that_covers_it() -> None:
    mesh = Mesh(StageLayout("m", 1, (("a",), ("b",), ("c",)), (100, 1000)))
    mesh.add("a", 5000, 500)
    mesh.tick(5)
    assert sorted((context, target) for context, _, target in mesh.moves) == [("a0x5000", "c"), ("a1x500", "b")]


def test_overloaded_instances_share_within_their_stage() -> None:
    mesh = Mesh()
    mesh.add("a", *[400] * 10)
    mesh.add("b", 400)
    mesh.tick(30)
    assert abs(mesh.load("a") - mesh.load("b")) <= 1600
    assert {target for _, _, target in mesh.moves} == {"b"}
    settled = len(mesh.moves)
    mesh.tick(100)
    assert len(mesh.moves) == settled, "balanced load stays where it is"


def test_a_quarter_above_the_mean_is_not_yet_too_much() -> None:
    mesh = Mesh()
    mesh.add("a", *[100] * 12)
    mesh.add("b", *[100] * 8)
    mesh.tick(30)
    assert mesh.moves == []


def test_without_rebalancing_load_stays() -> None:
    mesh = Mesh(parameters=StageParameters(refinement=FROZEN, rebalance=False))
    mesh.add("a", *[400] * 10)
    mesh.tick(30)
    assert mesh.moves == []


def test_stale_neighbours_are_not_believed() -> None:
    mesh = Mesh()
    mesh.add("a", *[400] * 10)
    agent = mesh.agents["a"]
    agent.receive("b", StageReport(0, None, ()), Capacity(0, 0), 0.0)
    late_ms = 1000 * mesh.parameters.stale_s + 1
    told = agent.tick(mesh.capacity("a"), tuple(mesh.running["a"].values()), late_ms)
    asks = [each for each in told if isinstance(each, ToPeer) and isinstance(each.message, Ask)]
    assert asks == []


def test_boundaries_are_refined_at_intervals_and_told() -> None:
    mesh = Mesh(parameters=StageParameters(RefinementParameters(interval_s=5.0, smoothing=1.0), rebalance=False))
    assert mesh.boundaries == {"a": 1000, "b": 1000, "c": inf, "d": inf}
    mesh.add("a", *[100] * 20)
    mesh.add("c", *[9000] * 4)
    mesh.add("d", *[9000] * 4)
    mesh.tick(49)
    assert mesh.boundaries["a"] == 1000
    mesh.tick(2)
    assert mesh.boundaries["a"] == 9000
    assert mesh.boundaries["c"] == inf


def test_a_new_plan_starts_from_its_own_boundary_and_a_loss_elsewhere_changes_none() -> None:
    mesh = Mesh(parameters=StageParameters(RefinementParameters(smoothing=1.0), rebalance=False))
    mesh.add("a", *[100] * 20)
    mesh.add("c", *[9000] * 8)
    mesh.tick(60)
    agent = mesh.agents["a"]
    assert agent.use_layout(LAYOUT.covering("abc"), MODEL, mesh.now_ms) == ()
    assert agent.boundary is not None
    assert agent.boundary.tokens == 9000
    planned_alike = StageLayout("m", 2, LAYOUT.stages, LAYOUT.boundaries_tokens)
    assert agent.use_layout(planned_alike, MODEL, mesh.now_ms) == (BoundaryMoved(9000),), "told as of this plan"
    assert agent.use_layout(planned_alike, MODEL, mesh.now_ms) == ()
    moved = agent.use_layout(StageLayout("m", 3, LAYOUT.stages, (500,)), MODEL, mesh.now_ms)
    assert moved == (BoundaryMoved(500),)
    assert agent.use_layout(LAYOUT.covering("ab"), MODEL, mesh.now_ms) == (BoundaryMoved(inf),)
    assert agent.boundary is None


def test_without_a_layout_nothing_is_handed_off_but_questions_are_answered() -> None:
    agent = StageAgent("a", "a0", StageParameters(), BidAskLimits())
    capacity = Capacity(5000, 5000)
    assert agent.tick(capacity, (RunningRequest("r", 5000, 10),), 1000.0) == ()
    (answer,) = agent.receive("b", Ask("b0-1", "q", 10, 10), capacity, 1000.0)
    assert isinstance(answer, ToPeer)


def test_who_is_in_no_stage_hands_nothing_off() -> None:
    agent = StageAgent("z", "z0", StageParameters(), BidAskLimits())
    agent.use_layout(LAYOUT, MODEL, 0.0)
    assert agent.tick(Capacity(5000, 5000), (RunningRequest("r", 5000, 10),), 1000.0) == ()


@pytest.mark.parametrize(("said", "lowest"), [(None, 100), (950.0, 950), (10.0, 10)])
def test_a_boundary_stays_above_what_the_stage_before_says_or_else_the_plan(said: float | None, lowest: float) -> None:
    layout = StageLayout("m", 1, (("a",), ("b",), ("c",)), (100, 1000))
    refinement = RefinementParameters(interval_s=1.0, smoothing=1.0, fewest_requests=2)
    agent = StageAgent("b", "b0", StageParameters(refinement, rebalance=False), BidAskLimits())
    agent.use_layout(layout, MODEL, 0.0)
    capacity = Capacity(0, 100_000)
    if said is not None:
        agent.receive("a", StageReport(0, said, ()), capacity, 500.0)
    agent.receive("c", StageReport(0, None, (RequestLength(1, 5),) * 4), capacity, 500.0)
    told = agent.tick(capacity, (), 1000.0)
    assert [each for each in told if isinstance(each, BoundaryMoved)] == [BoundaryMoved(lowest + 1)]


def test_what_has_just_come_is_not_sent_back_at_once() -> None:
    mesh = Mesh()
    mesh.add("a", *[400] * 4)
    mesh.tick(8)
    arrived = len(mesh.moves)
    assert arrived > 0
    mesh.running["a"].clear()
    mesh.tick(30)
    assert len(mesh.moves) == arrived, "although b has all the load now"
    mesh.tick(60)
    assert len(mesh.moves) > arrived


def test_the_frontend_of_a_request_is_told_within_the_stage_as_well() -> None:
    agent = StageAgent("a", "a0", StageParameters(refinement=FROZEN), BidAskLimits())
    agent.use_layout(LAYOUT, MODEL, 0.0)
    agent.receive("b", StageReport(0, 1000, ()), Capacity(800, 0), 500.0)
    running = tuple(RunningRequest(name, 400, 10, frontend_id="f") for name in "rs")
    told = agent.tick(Capacity(800, 9000), running, 600.0)
    asks = [each.message for each in told if isinstance(each, ToPeer) and isinstance(each.message, Ask)]
    assert [(each.request_id, each.frontend_id) for each in asks] == [("r", "f")]


def test_what_found_no_taker_rests() -> None:
    mesh = Mesh()
    for full in ("c", "d"):
        mesh.add(full, 99_990)
    mesh.add("a", 1200)
    mesh.tick(1)
    assert len(mesh.closed) == 1
    mesh.tick(8)
    assert len(mesh.closed) == 1
    mesh.tick(3)
    assert len(mesh.closed) == 2


contexts = st.lists(st.integers(1, 5000), max_size=30)


@settings(deadline=None)
@given(contexts, st.floats(0, 20_000))
def test_relief_never_exceeds_the_excess(lengths: list[int], excess: float) -> None:
    running = [RunningRequest(str(number), length, 0) for number, length in enumerate(lengths)]
    chosen = relieving(running, excess)
    left = excess - sum(request.context_tokens for request in chosen)
    assert left >= 0
    assert all(request.context_tokens > left for request in running if request not in chosen)


@pytest.mark.parametrize(
    ("own", "peers", "excess"), [(130, (100, 70), 30), (124, (100, 76), 0), (125, (75,), 0), (500, (), 0)]
)
def test_excess(own: int, peers: tuple[int, ...], excess: float) -> None:
    assert excess_tokens(own, peers, 0.25) == excess


def test_the_fewest_requests_are_moved() -> None:
    running = [RunningRequest(str(length), length, 0) for length in (5, 20, 10)]
    assert [request.context_tokens for request in relieving(running, 27)] == [20, 5]


def test_the_longest_leave_first() -> None:
    running = [RunningRequest(str(length), length, 0) for length in (5, 30, 10, 20)]
    assert [request.context_tokens for request in outgrown(running, 9)] == [30, 20, 10]


def test_reports_are_bounded() -> None:
    for length in (1025, 3000):
        report = StageReport.of(1, None, [RequestLength(1, length) for length in range(length)])
        assert MAX_LENGTHS / 2 <= len(report.lengths) <= MAX_LENGTHS
    short = tuple(RequestLength(1, length) for length in (MAX_LENGTHS + 2, *range(2, MAX_LENGTHS + 1)))
    assert StageReport.of(1, 5.0, short) == StageReport(1, 5.0, short)


def test_the_last_report_of_a_neighbour_counts_while_it_is_fresh() -> None:
    neighbours, report = Neighbours(3000.0), StageReport(1, None, ())
    assert neighbours.fresh("b", 0.0) is None
    neighbours.heard("b", StageReport(9, None, ()), 50.0)
    neighbours.heard("b", report, 100.0)
    assert neighbours.fresh("b", 3099.0) == report
    assert neighbours.fresh("b", 3100.0) is None
    neighbours.heard("b", report, 3100.0)
    neighbours.forget("b")
    assert neighbours.fresh("b", 3100.0) is None
