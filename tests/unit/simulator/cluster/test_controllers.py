"""What controllers are told, see and may do."""

from collections.abc import Sequence
from typing import ClassVar

import pytest

from controlplane.model.migration_order import MigrationOrder
from controlplane.model.placement import Decision, PlacementProblem
from controlplane.model.snapshot import Snapshot
from controlplane.policies.parameters import PolicyParameters
from controlplane.policies.registry import create_policy
from controlplane.policies.round_robin import RoundRobin
from simulator.cluster.config import ClusterConfig, Failure, InstanceSpec
from simulator.cluster.control import Cluster, ClusterEvent, Ended, FirstToken, Joined, Lost, Placed, Preempted
from simulator.cluster.recording import Recording, RecordingConfig
from simulator.cluster.simulation import ClusterSimulation
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig
from simulator.traces.request import TraceRequest

SMALL = InstanceConfig(
    block_tokens=16, kv_blocks=64, max_model_len_tokens=1024, max_batch_requests=4, max_step_tokens=100
)
PER_TOKEN = LinearCost(
    fixed_ms=10.0, prefill_token_ms=1.0, decode_request_ms=2.0, context_token_ms=0.0, attended_pair_ms=0.0
)


class Witness:
    """Looks every 50 ms."""

    interval_ms = 50.0

    def __init__(self) -> None:
        self.heard: list[tuple[float, ClusterEvent]] = []
        self.seen: list[tuple[float, dict[str, list[tuple[str, int, int]]]]] = []
        self.cluster: Cluster

    def attached(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def act(self, cluster: Cluster, now_ms: float) -> Sequence[MigrationOrder]:
        running = {
            instance_id: [
                (each.request_id, each.generated_tokens, cluster.oracle_remaining_tokens(each.request_id))
                for each in cluster.running(instance_id)
            ]
            for instance_id in cluster.instance_ids()
        }
        self.seen.append((now_ms, running))
        return ()

    def on_event(self, event: ClusterEvent, now_ms: float) -> None:
        self.heard.append((now_ms, event))


def run(requests: Sequence[TraceRequest], config: ClusterConfig, *controllers: Witness) -> ClusterSimulation:
    simulation = ClusterSimulation(requests, config, PER_TOKEN, create_policy("round_robin"), controllers)
    simulation.run()
    return simulation


def test_a_controller_sees_the_state_at_its_very_moment() -> None:
    witness = Witness()
    run([TraceRequest(0.0, 50, 40)], ClusterConfig(2, SMALL), witness)
    # The first token at 60, then one each 12 ms.
    assert witness.seen[0] == (50.0, {"instance-0": [], "instance-1": []})
    assert witness.seen[1] == (100.0, {"instance-0": [("r0", 4, 36)], "instance-1": []})
    assert witness.seen[-1] == (500.0, {"instance-0": [("r0", 37, 3)], "instance-1": []})


def test_a_controller_hears_of_everything_in_order() -> None:
    witness = Witness()
    run([TraceRequest(0.0, 50, 3), TraceRequest(0.05, 2000, 1)], ClusterConfig(1, SMALL), witness)
    assert [event for _, event in witness.heard] == [
        Joined("instance-0"),
        Placed("r0", "instance-0", "instance-0", 50),
        Ended("r1", "instance-0", witness.heard[2][1].error),  # type: ignore[union-attr]
        FirstToken("r0", "instance-0"),
        Ended("r0", "instance-0"),
    ]
    assert [now_ms for now_ms, _ in witness.heard] == pytest.approx([0.0, 0.0, 50.0, 60.0, 84.0])


def test_losses_returns_and_preemptions_are_told() -> None:
    witness = Witness()
    config = ClusterConfig(2, SMALL, failures=(Failure(0, 0.5, 0.25),))
    simulation = run(
        [TraceRequest(0.0, 300, 300), TraceRequest(0.0, 10, 1), *[TraceRequest(0.6, 400, 200)] * 2], config, witness
    )
    kinds = [type(event) for _, event in witness.heard]
    assert (kinds.count(Lost), kinds.count(Joined)) == (1, 3)
    assert kinds.count(Preempted) == simulation.preemptions > 0


def test_timers_and_messages_come_when_they_are_due() -> None:
    class Timers(Witness):
        interval_ms = None  # type: ignore[assignment]

        def attached(self, cluster: Cluster) -> None:
            self.rung: list[float] = []
            cluster.after(30.0, self.ring)
            cluster.after(1e9, self.ring)

        def ring(self, now_ms: float) -> None:
            self.rung.append(now_ms)

    timers = Timers()
    run([TraceRequest(0.0, 50, 3)], ClusterConfig(1, SMALL), timers)
    assert timers.rung == [30.0]


def test_watching_changes_no_outcome() -> None:
    requests = [TraceRequest(0.1 * index, 40 + 17 * index % 90, 1 + 31 * index % 80) for index in range(30)]
    config = ClusterConfig(2, SMALL, failures=(Failure(1, 1.0, 0.5),))
    alone = ClusterSimulation(requests, config, PER_TOKEN, create_policy("lmetric")).run()
    recording = RecordingConfig(interval_ms=7.0, max_samples=16)
    watched = ClusterSimulation(requests, config, PER_TOKEN, create_policy("lmetric"), [Witness()], recording)
    assert watched.run() == alone


def test_an_observing_policy_is_shown_the_cluster_in_time() -> None:
    class Observing(RoundRobin):
        name: ClassVar[str] = "observing"
        interval_s: ClassVar[float] = 0.02

        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[float, int]] = []

        @property
        def parameters(self) -> PolicyParameters:
            return PolicyParameters()

        def decide(self, problem: PlacementProblem) -> Decision:
            return super().decide(problem)

        def observe(self, snapshot: Snapshot, now_s: float) -> None:
            self.seen.append((now_s, int(snapshot.running_requests.sum())))

    policy = Observing()
    config = ClusterConfig(2, SMALL, report_interval_ms=0.0, report_delay_ms=0.0)
    ClusterSimulation([TraceRequest(0.05, 50, 3)], config, PER_TOKEN, policy).run()
    # It runs from 50 to 134 ms; a look of the moment in which it ends still finds it.
    assert policy.seen == [(pytest.approx(0.02 * (turn + 1)), int(turn in (2, 3, 4, 5))) for turn in range(6)]


def test_instances_may_differ() -> None:
    slow = LinearCost(fixed_ms=100.0, prefill_token_ms=0.0, decode_request_ms=0.0, context_token_ms=0.0)
    config = ClusterConfig(2, SMALL, specs=(InstanceSpec(SMALL), InstanceSpec(SMALL, cost=slow)))
    simulation = ClusterSimulation(
        [TraceRequest(0.0, 50, 2), TraceRequest(0.0, 50, 2)], config, PER_TOKEN, create_policy("round_robin")
    )
    fast_outcome, slow_outcome = simulation.run()
    assert fast_outcome.finished_s == pytest.approx(0.072)
    assert slow_outcome.finished_s == pytest.approx(0.2, rel=1e-2)


def test_a_recording_keeps_within_its_bounds() -> None:
    simulation = ClusterSimulation(
        [TraceRequest(0.0, 50, 400)],
        ClusterConfig(2, SMALL),
        PER_TOKEN,
        create_policy("round_robin"),
        (),
        RecordingConfig(10.0, 32),
    )
    simulation.run()
    recording = simulation.recording
    assert isinstance(recording, Recording)
    series = recording.series()
    assert 8 <= len(series.times_s) < 32
    assert series.running_requests.shape == series.kv_fill.shape == series.step_ms.shape == (len(series.times_s), 2)
    assert series.running_requests[1:, 0].tolist() == [1] * (len(series.times_s) - 1)
    assert series.step_ms[1:-1, 0] == pytest.approx(12.0)
    assert series.imbalance[1:] == pytest.approx(1.0)
    assert recording.step_times["instance-0"].steps == 399
    assert recording.step_times["instance-0"].variance_ms2 == pytest.approx(0.0, abs=1e-6)


def test_a_closed_loop_waits_for_the_answer() -> None:
    requests = [
        TraceRequest(0.0, 50, 3, session_id="a"),
        TraceRequest(0.01, 10, 1, session_id="a", think_s=0.5),
        TraceRequest(0.02, 10, 1, session_id="b", think_s=9.0),
        TraceRequest(0.03, 10, 1, session_id="a", think_s=0.25),
    ]
    outcomes = ClusterSimulation(requests, ClusterConfig(4, SMALL), PER_TOKEN, create_policy("round_robin")).run()
    assert [outcome.arrival_s for outcome in outcomes] == pytest.approx([0.0, 0.584, 0.02, 0.584 + 0.02 + 0.25])
