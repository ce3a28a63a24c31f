"""When requests come: at the times of the trace, or some time after the answer before."""

from collections.abc import Callable, Sequence

from simulator.cluster.events import EventQueue, Rank
from simulator.traces.request import TraceRequest


class Arrivals:
    """Feeds requests to `arrive(place in the trace, now_ms)`.

    A request with a `think_s` comes so long after the end of the one before it in its session (closed loop); all
    others at their `arrival_s`.
    """

    def __init__(
        self, requests: Sequence[TraceRequest], events: EventQueue, arrive: Callable[[int, float], None]
    ) -> None:
        self._requests = requests
        self._events = events
        self._arrive = arrive
        self._followers: dict[int, int] = {}
        latest_of: dict[str, int] = {}
        self._timed: list[int] = []
        for index, request in enumerate(requests):
            before = latest_of.get(request.session_id) if request.session_id else None
            if request.think_s is not None and before is not None:
                self._followers[before] = index
            else:
                self._timed.append(index)
            if request.session_id:
                latest_of[request.session_id] = index
        self._timed.sort(key=lambda index: requests[index].arrival_s)
        self._next = 0

    @property
    def known_times_ms(self) -> list[float]:
        """Of those whose time the trace says, ascending."""
        return [self._requests[index].arrival_s * 1000 for index in self._timed]

    def start(self) -> None:
        """Schedule the first request of the trace."""
        if self._next < len(self._timed):
            at_ms = self._requests[self._timed[self._next]].arrival_s * 1000
            self._events.at(at_ms, Rank.ARRIVAL, self._come)

    def ended(self, index: int, now_ms: float, expect: Callable[[float], None]) -> None:
        """A request has ended, well or not; `expect` is told when the next of its session comes, if there is one."""
        follower = self._followers.pop(index, None)
        if follower is not None:
            at_ms = now_ms + (self._requests[follower].think_s or 0.0) * 1000
            expect(at_ms)
            self._events.at(at_ms, Rank.ARRIVAL, lambda then_ms: self._arrive(follower, then_ms))

    def _come(self, now_ms: float) -> None:
        index = self._timed[self._next]
        self._next += 1
        self.start()
        self._arrive(index, now_ms)
