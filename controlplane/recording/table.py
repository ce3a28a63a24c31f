"""A cluster table that tells of what happens to it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from controlplane.model.cluster import ClusterLimits, ClusterTable
from controlplane.model.instance import InstanceDescription, InstanceState, KvBlocks, LoadReport
from controlplane.model.shared_event import SharedEvent
from controlplane.recording import events

Tell = Callable[[events.Event], None]


class RecordingTable(ClusterTable):
    """Behaves as `ClusterTable`. Placements are told by whoever places; everything else is told here."""

    def __init__(self, limits: ClusterLimits, number: int, tell: Tell) -> None:
        super().__init__(limits)
        self.number = number
        self._tell = tell
        self._is_quiet = False
        """What happens now is part of an event that was told."""

    def joined(self, instance: InstanceDescription) -> None:
        with self._told(events.Joined(self.number, instance)):
            super().joined(instance)

    def lost(self, instance_id: str, incarnation_id: str) -> None:
        with self._told(events.Lost(self.number, instance_id, incarnation_id)):
            super().lost(instance_id, incarnation_id)

    def reported(
        self,
        instance_id: str,
        incarnation_id: str,
        load: LoadReport,
        state: InstanceState,
        admitted_request_ids: Iterable[str] = (),
    ) -> None:
        admitted = tuple(admitted_request_ids)
        with self._told(events.Reported(self.number, instance_id, incarnation_id, load, state, admitted)):
            super().reported(instance_id, incarnation_id, load, state, admitted)

    def staled(self, instance_id: str, incarnation_id: str, stale: bool) -> None:
        with self._told(events.Staled(self.number, instance_id, incarnation_id, stale)):
            super().staled(instance_id, incarnation_id, stale)

    def unmonitor(self, instance_id: str, incarnation_id: str) -> None:
        with self._told(events.Unmonitored(self.number, instance_id, incarnation_id)):
            super().unmonitor(instance_id, incarnation_id)

    def adopt(self, source: ClusterTable, instance_id: str) -> None:
        assert isinstance(source, RecordingTable), "a recorder makes all tables"
        with self._told(events.Adopted(self.number, source.number, instance_id)):
            super().adopt(source, instance_id)

    def cached(self, instance_id: str, incarnation_id: str, blocks: KvBlocks) -> int:
        self._tell(events.Cached(self.number, instance_id, incarnation_id, blocks))
        return super().cached(instance_id, incarnation_id, blocks)

    def ended(self, request_id: str) -> tuple[str, ...]:
        self._tell(events.Ended(self.number, request_id))
        return super().ended(request_id)

    def shared(self, event: SharedEvent, now_s: float) -> bool:
        self._tell(events.Shared(self.number, event, now_s))
        return super().shared(event, now_s)

    def take_over(self, former: ClusterTable) -> int:
        assert isinstance(former, RecordingTable), "a recorder makes all tables"
        self._tell(events.TakenOver(self.number, former.number))
        return super().take_over(former)

    def forget_unreported(self, now_s: float) -> int:
        if self.expected_requests():
            self._tell(events.Forgotten(self.number, now_s))
        return super().forget_unreported(now_s)

    @contextmanager
    def _told(self, event: events.Event) -> Iterator[None]:
        """What the block does is told as this one event."""
        if self._is_quiet:
            yield
            return
        self._tell(event)
        self._is_quiet = True
        try:
            yield
        finally:
            self._is_quiet = False
