"""A cluster table that tells of what happens to it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from controlplane.model.cluster import ClusterTable
from controlplane.model.cluster_limits import ClusterLimits
from controlplane.model.instance import InstanceDescription, InstanceState, KvBlocks, LoadReport
from controlplane.model.kv_costs import KvCosts
from controlplane.model.queue_belief import PresentLoad
from controlplane.model.shared_event import SharedEvent
from controlplane.model.step_costs import StepCosts
from controlplane.recording import events

OnEvent = Callable[[events.Event], None]


class RecordingTable(ClusterTable):
    """A `ClusterTable` that records its events. Placements are recorded by whoever places; everything else is recorded
    here."""

    def __init__(self, limits: ClusterLimits, number: int, on_event: OnEvent) -> None:
        super().__init__(limits)
        self.number = number
        self._on_event = on_event
        self._is_quiet = False
        """Set inside a recorded event: what happens then follows from it and is not recorded again."""

    def joined(self, instance: InstanceDescription) -> None:
        with self._recorded(events.Joined(self.number, instance)):
            super().joined(instance)

    def lost(self, instance_id: str, incarnation_id: str) -> None:
        with self._recorded(events.Lost(self.number, instance_id, incarnation_id)):
            super().lost(instance_id, incarnation_id)

    def reported(
        self,
        instance_id: str,
        incarnation_id: str,
        load: LoadReport,
        state: InstanceState,
        admitted_request_ids: Iterable[str] = (),
        ended_request_ids: Iterable[str] = (),
    ) -> None:
        admitted, ended = tuple(admitted_request_ids), tuple(ended_request_ids)
        with self._recorded(events.Reported(self.number, instance_id, incarnation_id, load, state, admitted, ended)):
            super().reported(instance_id, incarnation_id, load, state, admitted, ended)

    def staled(self, instance_id: str, incarnation_id: str, stale: bool) -> None:
        with self._recorded(events.Staled(self.number, instance_id, incarnation_id, stale)):
            super().staled(instance_id, incarnation_id, stale)

    def unmonitor(self, instance_id: str, incarnation_id: str) -> None:
        with self._recorded(events.Unmonitored(self.number, instance_id, incarnation_id)):
            super().unmonitor(instance_id, incarnation_id)

    def adopt(self, source: ClusterTable, instance_id: str) -> None:
        assert isinstance(source, RecordingTable), "a recorder makes all tables"
        with self._recorded(events.Adopted(self.number, source.number, instance_id)):
            super().adopt(source, instance_id)

    def cached(self, instance_id: str, incarnation_id: str, blocks: KvBlocks) -> int:
        self._on_event(events.Cached(self.number, instance_id, incarnation_id, blocks))
        return super().cached(instance_id, incarnation_id, blocks)

    def costed(self, instance_id: str, incarnation_id: str, costs: StepCosts) -> None:
        with self._recorded(events.Costed(self.number, instance_id, incarnation_id, costs)):
            super().costed(instance_id, incarnation_id, costs)

    def kv_costed(self, instance_id: str, incarnation_id: str, costs: KvCosts) -> None:
        with self._recorded(events.KvCosted(self.number, instance_id, incarnation_id, costs)):
            super().kv_costed(instance_id, incarnation_id, costs)

    def ended(self, request_id: str) -> tuple[str, ...]:
        self._on_event(events.Ended(self.number, request_id))
        return super().ended(request_id)

    def shared(self, event: SharedEvent, now_s: float) -> bool:
        self._on_event(events.Shared(self.number, event, now_s))
        return super().shared(event, now_s)

    def corrected(self, instance_id: str, present: PresentLoad, now_s: float) -> None:
        self._on_event(events.Corrected(self.number, instance_id, present, now_s))
        super().corrected(instance_id, present, now_s)

    def take_over(self, former: ClusterTable) -> int:
        assert isinstance(former, RecordingTable), "a recorder makes all tables"
        self._on_event(events.TakenOver(self.number, former.number))
        return super().take_over(former)

    def forget_unreported(self, now_s: float) -> int:
        if self.expected_requests() or len(self.expected) or len(self._unseen):
            self._on_event(events.Forgotten(self.number, now_s))
        return super().forget_unreported(now_s)

    @contextmanager
    def _recorded(self, event: events.Event) -> Iterator[None]:
        """Record this one event for everything that the block does."""
        if self._is_quiet:
            yield
            return
        self._on_event(event)
        self._is_quiet = True
        try:
            yield
        finally:
            self._is_quiet = False
