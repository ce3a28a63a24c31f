"""When policies are shown the cluster."""

from controlplane.model.snapshot import Snapshot
from controlplane.policies.lmetric import LMetric
from controlplane.scheduler.placement_service import Observation
from tests.unit.controlplane.builders import cluster


class Watching(LMetric):
    interval_s = 0.25

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[tuple[str, float]] = []

    def observe(self, snapshot: Snapshot, now_s: float) -> None:
        self.shown.append((snapshot.model, now_s))


def test_it_is_shown_at_once_and_then_by_its_interval() -> None:
    told: list[float] = []
    observation, policy, table = Observation(told.append), Watching(), cluster("a")
    for tick in range(11):
        observation.tick(policy, table, tick / 10)
    assert [now_s for _, now_s in policy.shown] == [0.0, 0.3, 0.5, 0.8, 1.0]
    assert told == [0.0, 0.3, 0.5, 0.8, 1.0]


def test_what_was_missed_is_not_made_up_for_and_another_policy_starts_anew() -> None:
    observation, first, second, table = Observation(), Watching(), Watching(), cluster("a")
    observation.tick(first, table, 0.0)
    observation.tick(first, table, 10.0)
    observation.tick(first, table, 10.1)
    assert [now_s for _, now_s in first.shown] == [0.0, 10.0]
    observation.tick(second, table, 10.15)
    assert second.shown == [("m", 10.15)]


def test_a_policy_that_does_not_watch_is_left_alone() -> None:
    told: list[float] = []
    Observation(told.append).tick(LMetric(), cluster("a"), 0.0)
    assert not told
