"""The rescheduler's orders from the moment they are given: under way, settled, refused, remembered. Pure."""

from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from controlplane.model.migration_order import MigrationOrder
from mesh.backoff import pause_after
from mesh.errors import IllegalTransition
from mesh.invariants import invariants

FIRST_HOLD_S = 2.0
LONGEST_HOLD_S = 120.0
TOLERATED_REFUSALS = 1
"""A target may refuse so often in a row before it is left alone: one refusal is often the request's own fault."""
UNSETTLED_S = 10.0
"""A move that reports do not confirm for so long is taken for confirmed."""
UNSEEN_S = 60.0
"""A request that no report names for so long has ended. A report without it proves nothing: it may have been made
before the target took the request over, and arrive after the move has ended; and a request that moves is in none."""


class OrderOutcome(StrEnum):
    """What has become of an order so far."""

    UNDER_WAY = "under way"
    MOVED = "moved"
    STAYED = "stayed"


@dataclass(slots=True)
class OrderedMigration:
    """One order and what became of it."""

    order: MigrationOrder
    ordered_s: float
    ordered_unix_ms: int
    outcome: OrderOutcome = OrderOutcome.UNDER_WAY
    message: str = ""
    """Why the request stayed."""
    paused_ms: float = 0.0
    ended_s: float | None = None

    @property
    def duration_ms(self) -> float:
        """From the order to its end; 0 while it is under way."""
        return 0.0 if self.ended_s is None else 1000 * (self.ended_s - self.ordered_s)


@dataclass(slots=True)
class _Left:
    instances: frozenset[str]
    seen_s: float
    """When the request was last known to run."""


@dataclass(slots=True)
class _Hold:
    failures: int
    until_s: float


class Migrations:
    """All orders that matter now, and the last `max_remembered`."""

    def __init__(self, max_in_flight: int, max_remembered: int) -> None:
        self.in_flight = 0
        self.moved_total = 0
        self.stayed_total = 0
        self._max_in_flight = max_in_flight
        self._unsettled: dict[str, OrderedMigration] = {}
        """By request: under way, or moved and not yet seen in the reports of both sides."""
        self._remembered: deque[OrderedMigration] = deque(maxlen=max_remembered)
        self._requests: dict[str, _Hold] = {}
        self._targets: dict[str, _Hold] = {}
        self._left: dict[str, _Left] = {}
        """By request: the instances that it was moved away from."""

    def __contains__(self, request_id: str) -> bool:
        """Whether an order about the request is under way or not settled yet."""
        return request_id in self._unsettled

    @property
    def room(self) -> int:
        """Further orders that may be given now."""
        return self._max_in_flight - self.in_flight

    @invariants
    def validate(self) -> None:
        """Check what must hold between two calls. Raises `InvariantBroken`."""
        under_way = sum(each.outcome is OrderOutcome.UNDER_WAY for each in self._unsettled.values())
        assert self.in_flight == under_way, f"{self.in_flight} orders are counted as under way, {under_way} are"
        assert 0 <= self.in_flight <= self._max_in_flight, f"{self.in_flight} orders, {self._max_in_flight} at most"
        for request_id, ordered in self._unsettled.items():
            assert ordered.order.request_id == request_id, f"{ordered} is kept as {request_id}"
            assert ordered.outcome is not OrderOutcome.STAYED, f"{ordered} has nothing left to be seen"
            assert (ordered.ended_s is None) == (ordered.outcome is OrderOutcome.UNDER_WAY), f"{ordered} ends once"

    def begin(self, order: MigrationOrder, now_s: float, unix_ms: int) -> OrderedMigration:
        """An order is given. Raises `IllegalTransition` where there is no room, or the request moves already."""
        if self.room < 1 or order.request_id in self:
            raise IllegalTransition(
                f"{order} cannot be given: {self.in_flight} of {self._max_in_flight} are under way, "
                f"{'one' if order.request_id in self else 'none'} of them of this request"
            )
        ordered = OrderedMigration(order, now_s, unix_ms)
        self._unsettled[order.request_id] = ordered
        self._remembered.append(ordered)
        self.in_flight += 1
        return ordered

    def end(self, ordered: OrderedMigration, *, moved: bool, message: str, paused_ms: float, now_s: float) -> None:
        """The source has said how it went, or could not be asked."""
        if ordered.outcome is not OrderOutcome.UNDER_WAY:
            raise IllegalTransition(f"{ordered} has ended before")
        self.in_flight -= 1
        ordered.outcome = OrderOutcome.MOVED if moved else OrderOutcome.STAYED
        ordered.message, ordered.paused_ms, ordered.ended_s = message, paused_ms, now_s
        request_id, target_id = ordered.order.request_id, ordered.order.target_instance_id
        if moved:
            self.moved_total += 1
            left = self._left.pop(request_id, None)
            before = frozenset[str]() if left is None else left.instances
            self._left[request_id] = _Left(before | {ordered.order.source_instance_id}, now_s)
            self._requests.pop(request_id, None)
            self._targets.pop(target_id, None)
        else:
            self.stayed_total += 1
            del self._unsettled[request_id]
            _hold(self._requests, request_id, now_s)
            _hold(self._targets, target_id, now_s)

    def settle(self, heard_s: Callable[[str], float | None], now_s: float) -> None:
        """Forget what the reports of both sides have shown by now, and holds that are over. `heard_s` tells when an
        instance last reported its requests, None for one that is gone."""
        for request_id, ordered in list(self._unsettled.items()):
            if ordered.ended_s is None:
                continue
            sides = (ordered.order.source_instance_id, ordered.order.target_instance_id)
            heard = [heard_s(side) for side in sides]
            if now_s - ordered.ended_s > UNSETTLED_S or all(at is None or at > ordered.ended_s for at in heard):
                del self._unsettled[request_id]
        for holds in (self._requests, self._targets):
            for key in [key for key, hold in holds.items() if now_s > hold.until_s + LONGEST_HOLD_S]:
                del holds[key]

    def keep(self, running: Container[str], now_s: float) -> None:
        """Reports name these requests; where others have been is forgotten after `UNSEEN_S`."""
        for request_id, left in list(self._left.items()):
            if request_id in running or request_id in self._unsettled:
                left.seen_s = now_s
            elif now_s - left.seen_s > UNSEEN_S:
                del self._left[request_id]

    def left(self) -> dict[str, frozenset[str]]:
        """The instances that each running request was moved away from: it does not go back, so that no two instances
        can pass a request to and fro."""
        return {request_id: left.instances for request_id, left in self._left.items()}

    def moving(self) -> tuple[MigrationOrder, ...]:
        """Orders whose requests count at their targets already."""
        return tuple(ordered.order for ordered in self._unsettled.values())

    def held_requests(self, now_s: float) -> frozenset[str]:
        """Requests that could not be moved a moment ago; the wait doubles each time."""
        return frozenset(key for key, hold in self._requests.items() if now_s < hold.until_s)

    def shunned_targets(self, now_s: float) -> frozenset[str]:
        """Instances that would not or could not take requests several times in a row."""
        return frozenset(
            key for key, hold in self._targets.items() if hold.failures > TOLERATED_REFUSALS and now_s < hold.until_s
        )

    def latest(self, count: int) -> list[OrderedMigration]:
        """The last orders, latest first."""
        return list(islice(reversed(self._remembered), count))

    def of_request(self, request_id: str) -> list[OrderedMigration]:
        """Remembered orders about a client's request, all its choices included, first one first."""
        return [
            ordered
            for ordered in self._remembered
            if ordered.order.request_id == request_id or ordered.order.request_id.startswith(f"{request_id}-")
        ]


def _hold(holds: dict[str, _Hold], key: str, now_s: float) -> None:
    failures = holds[key].failures + 1 if key in holds else 1
    holds[key] = _Hold(failures, now_s + pause_after(failures, FIRST_HOLD_S, LONGEST_HOLD_S))
