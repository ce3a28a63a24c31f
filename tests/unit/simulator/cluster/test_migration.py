"""Requests that move between modelled instances: by hand, and under random orders and failures."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import engine_worker.coordinator.coordinator
import engine_worker.coordinator.incoming
import simulator.cluster.migration.coordinator
from controlplane.model.instance import InstancePhase
from controlplane.model.migration_order import MigrationOrder
from controlplane.policies.registry import create_policy
from controlplane.protocols.migration.limits import ManagerLimits
from controlplane.protocols.migration.source_manager import SourceManager
from controlplane.protocols.migration.target_manager import TargetManager
from simulator.cluster.config import ClusterConfig, Failure, InstanceSpec, KvLinkConfig, MigrationConfig
from simulator.cluster.control import Cluster, ClusterEvent, FirstToken, MigrationEnd
from simulator.cluster.simulation import ClusterSimulation
from simulator.cluster.worker import Worker
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig
from simulator.instance.sequence import SequenceState
from simulator.traces.request import TraceRequest
from tests.examples import examples

BLOCK_BYTES = 1 << 20
SMALL = InstanceConfig(
    block_tokens=16,
    kv_blocks=64,
    max_model_len_tokens=1024,
    max_batch_requests=4,
    max_step_tokens=100,
    block_bytes=BLOCK_BYTES,
)
PER_TOKEN = LinearCost(
    fixed_ms=10.0, prefill_token_ms=1.0, decode_request_ms=2.0, context_token_ms=0.0, attended_pair_ms=0.0
)
BLOCK_A_MS = KvLinkConfig(latency_ms=1.0, bandwidth_gib_per_s=1000 / 1024, max_parallel=3)
"""One block of 1 MiB each millisecond."""


class Orders:
    """Orders given migrations at given times and remembers what it was told."""

    interval_ms = None

    def __init__(self, orders: Sequence[tuple[float, str, int, int]]) -> None:
        self._orders = orders
        self.ends: list[MigrationEnd] = []
        self.first_tokens: list[str] = []

    def attached(self, cluster: Cluster) -> None:
        for at_ms, request_id, source, target in self._orders:
            order = MigrationOrder(request_id, f"instance-{source}", f"instance-{target}", "for a test")
            cluster.after(at_ms, lambda _, order=order: cluster.order(order))  # type: ignore[misc]

    def act(self, cluster: Cluster, now_ms: float) -> Sequence[MigrationOrder]:
        raise AssertionError("it has no interval")

    def on_event(self, event: ClusterEvent, now_ms: float) -> None:
        if isinstance(event, MigrationEnd):
            self.ends.append(event)
        elif isinstance(event, FirstToken):
            self.first_tokens.append(event.request_id)


def two(config: InstanceConfig = SMALL, **changes: object) -> ClusterConfig:
    return replace(ClusterConfig(2, config, link=BLOCK_A_MS), **changes)  # type: ignore[arg-type]


def simulation(
    requests: Sequence[TraceRequest], config: ClusterConfig, orders: Sequence[tuple[float, str, int, int]] = ()
) -> tuple[ClusterSimulation, Orders]:
    controller = Orders(orders)
    return ClusterSimulation(requests, config, PER_TOKEN, create_policy("round_robin"), [controller]), controller


def test_the_managers_are_those_that_run_live() -> None:
    live, simulated = engine_worker.coordinator, simulator.cluster.migration.coordinator
    assert simulated.SourceManager is live.coordinator.SourceManager is SourceManager  # type: ignore[attr-defined]
    assert simulated.TargetManager is live.incoming.TargetManager is TargetManager  # type: ignore[attr-defined]


def test_one_migration_by_hand() -> None:
    run, orders = simulation([TraceRequest(0.0, 50, 40)], two(), [(100.0, "r0", 0, 1)])
    (outcome,) = run.run()
    (end,) = orders.ends
    # Prefill until 60, then 12 ms a token. Offered at 100, accepted at 101; three full blocks and 1 ms of latency,
    # there at 105.5; pulled is heard at 106, in the step that ends at 108; one more block, from 108.5 to 110.5;
    # committed is heard at 111, when the target has been at it for half a millisecond.
    assert (end.moved, end.rounds, end.blocks) == (True, 1, 4)
    assert end.ended_ms == pytest.approx(111.0)
    assert end.paused_ms == pytest.approx(3.0)
    # 5 tokens at 108; the target computes the last of them again (10 + 1), and then 34 more.
    assert outcome.finished_s == pytest.approx((110.5 + 11 + 34 * 12) / 1000)
    assert outcome.instance_id == "instance-1"
    assert [worker.instance.load().generated_tokens_total for worker in run.workers.values()] == [5, 35]


def test_a_slow_link_takes_more_rounds() -> None:
    slow = replace(BLOCK_A_MS, bandwidth_gib_per_s=BLOCK_A_MS.bandwidth_gib_per_s / 100)
    run, orders = simulation([TraceRequest(0.0, 90, 200)], two(link=slow), [(100.0, "r0", 0, 1)])
    run.run()
    (end,) = orders.ends
    assert end.moved
    assert end.rounds > 1
    assert end.paused_ms < 2 * 100 + 5


def test_a_target_without_room_refuses_and_the_request_goes_on() -> None:
    requests = [TraceRequest(0.0, 500, 200), TraceRequest(0.0, 700, 200)]
    run, orders = simulation(requests, two(), [(1500.0, "r0", 0, 1)])
    first, _ = run.run()
    (end,) = orders.ends
    assert (end.moved, end.refused) == (False, True)
    assert "too few free KV blocks" in end.reason
    assert first.instance_id == "instance-0"


def test_an_order_for_an_unknown_or_moving_request_is_answered_at_once() -> None:
    run, orders = simulation(
        [TraceRequest(0.0, 50, 40)], two(), [(90.0, "r7", 0, 1), (100.0, "r0", 0, 1), (101.0, "r0", 0, 1)]
    )
    run.run()
    assert [end.moved for end in orders.ends] == [False, False, True]
    assert "does not run" in orders.ends[0].reason
    assert "being moved already" in orders.ends[1].reason


@pytest.mark.parametrize("at_s", [0.1012, 0.103, 0.1095, 0.1102])
def test_a_source_that_dies_while_it_hands_off_loses_no_token(at_s: float) -> None:
    run, orders = simulation([TraceRequest(0.0, 50, 40)], two(failures=(Failure(0, at_s),)), [(100.0, "r0", 0, 1)])
    (outcome,) = run.run()
    assert (outcome.error, outcome.output_tokens, outcome.instance_id) == ("", 40, "instance-1")
    assert [end.moved for end in orders.ends] == [False]
    (worker,) = run.workers.values()
    assert worker.instance.load().kv_blocks_used == 0
    assert worker.instance.load().generated_tokens_total in (35, 36)


@pytest.mark.parametrize("at_s", [0.1012, 0.103, 0.1095, 0.1102])
def test_a_target_that_dies_leaves_the_request_or_has_it_recovered(at_s: float) -> None:
    run, orders = simulation([TraceRequest(0.0, 50, 40)], two(failures=(Failure(1, at_s),)), [(100.0, "r0", 0, 1)])
    (outcome,) = run.run()
    assert (outcome.error, outcome.output_tokens, outcome.instance_id) == ("", 40, "instance-0")
    assert [end.moved for end in orders.ends] == [False]
    (worker,) = run.workers.values()
    assert worker.instance.load().generated_tokens_total == 40


def phased(*phases: InstancePhase, config: InstanceConfig = SMALL, **changes: object) -> ClusterConfig:
    specs = tuple(InstanceSpec(config, phase=phase) for phase in phases)
    base = ClusterConfig(len(specs), config, specs=specs, link=BLOCK_A_MS)
    return replace(base, **changes)  # type: ignore[arg-type]


def test_prefill_here_decode_there() -> None:
    run, orders = simulation(
        [TraceRequest(0.0, 250, 20), TraceRequest(0.2, 30, 1)], phased(InstancePhase.PREFILL, InstancePhase.DECODE)
    )
    first, second = run.run()
    # 110 + 110 for two full chunks of 100; then 50 more beside the other request's 30.
    assert first.first_token_s == pytest.approx(0.310)
    assert (first.instance_id, second.instance_id) == ("instance-1", "instance-0")
    assert orders.first_tokens == ["r0", "r1"]
    assert (run.migrations.transferred, run.migrations.not_transferred) == (1, 0)
    assert orders.ends[0].rounds >= 1  # blocks went ahead while the prompt was computed
    prefill, decode = (worker.instance.load() for worker in run.workers.values())
    assert prefill.generated_tokens_total + decode.generated_tokens_total == 21
    assert prefill.generated_tokens_total <= 3


@pytest.mark.parametrize(("prompt_tokens", "generated_there"), [(250, 19), (30, 18)])
def test_a_transfer_can_pause_with_the_first_token(prompt_tokens: int, generated_there: int) -> None:
    """A prompt of several steps was offered before it was computed; one of a single step brings one more token."""
    at_once = MigrationConfig(ManagerLimits(transfer=ManagerLimits().stop_and_copy))
    run, _ = simulation(
        [TraceRequest(0.0, prompt_tokens, 20)],
        phased(InstancePhase.PREFILL, InstancePhase.DECODE, migration=at_once),
    )
    run.run()
    assert [worker.instance.load().generated_tokens_total for worker in run.workers.values()] == [
        20 - generated_there,
        generated_there,
    ]


def test_a_full_decode_instance_is_asked_again_later() -> None:
    requests = [TraceRequest(0.0, 600, 40), TraceRequest(0.0, 600, 40)]
    run, orders = simulation(requests, phased(InstancePhase.PREFILL, InstancePhase.DECODE))
    outcomes = run.run()
    assert not any(outcome.error for outcome in outcomes)
    assert any(end.refused for end in orders.ends)
    assert run.migrations.transferred + run.migrations.not_transferred == 2


class Chaos:
    """Orders migrations from a script of numbers, and checks at every turn that nobody runs a request twice."""

    interval_ms = 17.0

    def __init__(self, script: Sequence[int]) -> None:
        self._script = list(script)
        self.simulation: ClusterSimulation
        self.ends: list[MigrationEnd] = []
        self.ordered = 0

    def attached(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def act(self, cluster: Cluster, now_ms: float) -> Sequence[MigrationOrder]:
        active = [
            request_id
            for worker in self.simulation.workers.values()
            for request_id in worker.instance.request_ids
            if worker.instance.state_of(request_id) not in (SequenceState.IMPORTING, SequenceState.PAUSED)
        ]
        assert len(active) == len(set(active)), "two instances run the same request"
        for worker in self.simulation.workers.values():
            if worker.instance.planned is None:
                worker.instance.validate()
        for coordinator in self.simulation.migrations.coordinators.values():
            coordinator.source.validate()
            coordinator.target.validate()
        orders = []
        ids = cluster.instance_ids()
        for _ in range(2):
            if not self._script or len(ids) < 2 or not active:
                break
            number = self._script.pop()
            request_id = active[number % len(active)]
            entry = self.simulation.ledger.open.get(request_id)
            if entry is None or entry.owner is None or entry.owner.instance_id not in ids:
                continue
            assert cluster.oracle_remaining_tokens(request_id) > 0
            others = [each for each in ids if each != entry.owner.instance_id]
            orders.append(
                MigrationOrder(request_id, entry.owner.instance_id, others[number // 7 % len(others)], "chaos")
            )
        self.ordered += len(orders)
        return orders

    def on_event(self, event: ClusterEvent, now_ms: float) -> None:
        if isinstance(event, MigrationEnd):
            self.ends.append(event)


phases = st.sampled_from([InstancePhase.ANY, InstancePhase.PREFILL, InstancePhase.DECODE])
clusters = st.builds(
    lambda sizes, kinds, link, delays, skip: ClusterConfig(
        3,
        SMALL,
        specs=tuple(
            InstanceSpec(replace(SMALL, kv_blocks=size), phase=kind) for size, kind in zip(sizes, kinds, strict=True)
        ),
        link=KvLinkConfig(*link),
        migration=MigrationConfig(ManagerLimits(parallel=2, arriving=2), message_delay_ms=delays[0]),
        report_interval_ms=delays[1],
        skip_steps=skip,
    ),
    st.lists(st.integers(64, 90), min_size=3, max_size=3),
    st.lists(phases, min_size=3, max_size=3),
    st.tuples(st.floats(0, 20), st.floats(0.02, 2.0), st.integers(1, 3)),
    st.tuples(st.sampled_from([0.0, 0.5, 30.0]), st.sampled_from([0.0, 20.0])),
    st.booleans(),
)
loads = st.lists(
    st.tuples(st.floats(0, 2.0), st.integers(1, 400), st.integers(1, 200), st.integers(0, 2)), min_size=1, max_size=14
)
deaths = st.lists(st.tuples(st.integers(0, 2), st.floats(0.05, 3.0), st.none() | st.floats(0.1, 1.0)), max_size=2)


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(config=clusters, load=loads, deaths=deaths, script=st.lists(st.integers(0, 1000), max_size=60))
def test_whatever_is_ordered_and_whoever_dies(
    config: ClusterConfig,
    load: list[tuple[float, int, int, int]],
    deaths: list[tuple[int, float, float | None]],
    script: list[int],
) -> None:
    """Every request ends once, its tokens are generated once each, and all blocks are free in the end."""
    failures = {number: Failure(number, at_s, back_after_s) for number, at_s, back_after_s in deaths}
    config = replace(config, failures=tuple(failures.values()))
    requests = [
        TraceRequest(at_s, input_tokens, output_tokens, (group, group + 10) if group else (), 32 if group else 0)
        for at_s, input_tokens, output_tokens, group in sorted(load)
    ]
    runs = []
    for changed in (config, config, replace(config, skip_steps=not config.skip_steps)):
        chaos = Chaos(script)
        run = ClusterSimulation(requests, changed, PER_TOKEN, create_policy("lmetric"), [chaos])
        chaos.simulation = run
        dead: list[Worker] = []
        lose = run.fleet.lose
        run.fleet.lose = lambda number, now_ms, lose=lose, dead=dead: dead.append(w := lose(number, now_ms)) or w  # type: ignore[method-assign, misc, func-returns-value]
        outcomes = run.run()
        assert len(outcomes) == len(requests)
        emitted = sum(outcome.output_tokens for outcome in outcomes)
        workers = [*run.workers.values(), *dead]
        assert sum(worker.instance.load().generated_tokens_total for worker in workers) == emitted
        for request, outcome in zip(requests, outcomes, strict=True):
            assert outcome.error or outcome.output_tokens == request.output_tokens
        for worker in run.workers.values():
            worker.instance.validate()
            assert not worker.instance.request_ids
            assert worker.instance.load().kv_blocks_used == 0
        for coordinator in run.migrations.coordinators.values():
            assert coordinator.source.orders == coordinator.source.transfers == coordinator.target.running == 0
        assert run.links.waiting_transfers() == 0
        assert len([end for end in chaos.ends if end.order.reason == "chaos"]) == chaos.ordered
        runs.append((outcomes, chaos.ends))
    assert runs[0] == runs[1], "the same arguments gave different outcomes"
    assert runs[0] == runs[2], "skipping steps changed something"
