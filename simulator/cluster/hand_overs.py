"""Requests that are prefilled on one instance and decoded on another."""

from collections.abc import Callable

from controlplane.model.migration_order import MigrationOrder
from simulator.cluster.config import MigrationConfig
from simulator.cluster.events import EventQueue, Rank
from simulator.cluster.migration.office import MigrationEnd, MigrationOffice

REASON = "to be decoded there"


class HandOvers:
    """Orders a migration as soon as an instance begins to prefill such a request, and again where the target refuses,
    with pauses that double. A request whose hand-over fails is decoded where it is."""

    def __init__(
        self,
        config: MigrationConfig,
        events: EventQueue,
        office: MigrationOffice,
        tell: Callable[[MigrationEnd], None],
    ) -> None:
        self.moved = 0
        self.failed = 0
        """Their requests decode, or ended, where they were prefilled."""
        self._config = config
        self._events = events
        self._office = office
        self._tell = tell
        self._expected: dict[str, MigrationOrder] = {}

    def expect(self, request_id: str, prefill_id: str, decode_id: str) -> None:
        """A request was placed so."""
        self._expected[request_id] = MigrationOrder(request_id, prefill_id, decode_id, REASON)

    def begin(self, request_id: str, prefill_id: str, decode_id: str) -> None:
        """A request whose prompt has just been computed is to be decoded there."""
        self._attempt(MigrationOrder(request_id, prefill_id, decode_id, REASON), 1)

    def prefill_began(self, request_id: str) -> None:
        """Of any request."""
        order = self._expected.pop(request_id, None)
        if order is not None:
            self._attempt(order, 1)

    def forget(self, request_id: str) -> None:
        """It ended, or was placed anew."""
        self._expected.pop(request_id, None)

    def _attempt(self, order: MigrationOrder, tries: int) -> None:
        self._office.order(order, lambda end: self._ended(end, tries), self._config.hand_over_limits)

    def _ended(self, end: MigrationEnd, tries: int) -> None:
        self._tell(end)
        if end.moved:
            self.moved += 1
        elif end.refused and tries < self._config.hand_over_tries:
            pause_ms = self._config.hand_over_retry_ms * 2 ** (tries - 1)
            self._events.at(self._events.now_ms + pause_ms, Rank.MESSAGE, lambda _: self._attempt(end.order, tries + 1))
        else:
            self.failed += 1
