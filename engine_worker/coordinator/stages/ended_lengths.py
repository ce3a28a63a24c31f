"""Lengths of the requests that ended on a worker, and how many run on average: what stage plans are made from. Pure."""

from collections import deque
from math import exp

from engine_worker.request_table import RequestTable

REMEMBERED = 4096
AVERAGED_S = 120.0
"""Time constant of the average."""


class EndedLengths:
    """Looks at the table now and then: a request that is there no more has ended, unless it moved away."""

    def __init__(self) -> None:
        self.lengths: deque[tuple[int, int]] = deque(maxlen=REMEMBERED)
        """Input and output tokens, oldest first."""
        self.ended_total = 0
        self._weighted = 0.0
        self._weight = 0.0
        self._running: dict[str, tuple[int, int]] = {}
        self._looked_s: float | None = None

    def moved_away(self, request_id: str) -> None:
        """It goes on elsewhere and ends there."""
        self._running.pop(request_id, None)

    def look(self, table: RequestTable, now_s: float) -> None:
        """Call it every few hundred milliseconds."""
        running = {
            tracked.request.request_id: (len(tracked.request.prompt_token_ids), len(tracked.emitted_token_ids))
            for tracked in table
            if tracked.state == "running"
        }
        for request_id, (inputs, outputs) in self._running.items():
            if request_id not in running and outputs:
                self.lengths.append((inputs, outputs))
                self.ended_total += 1
        self._running = running
        if self._looked_s is not None:
            fading = exp((self._looked_s - now_s) / AVERAGED_S)
            self._weighted = fading * self._weighted + (1 - fading) * len(running)
            self._weight = fading * self._weight + (1 - fading)
        self._looked_s = now_s

    @property
    def in_flight(self) -> float:
        """Running requests on average; from the start on, not as if there had been none before."""
        return self._weighted / self._weight if self._weight else 0.0
