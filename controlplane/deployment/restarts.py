"""When a process that ended is started again (pure)."""

from collections import deque
from dataclasses import dataclass, field

from mesh.backoff import pause_after

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 10.0
WINDOW_S = 120.0
MAX_RESTARTS_IN_WINDOW = 8


@dataclass(slots=True)
class RestartHistory:
    """The recent restarts of one process.

    A process comes back after half a second, then after twice as long each time, and no more once it has ended
    too often within the window: a worker that cannot start would otherwise burn a core for ever.
    """

    restarts_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_RESTARTS_IN_WINDOW))

    def next_delay_s(self, now_s: float) -> float | None:
        """Seconds to wait before starting again, counted as a restart; None: give up."""
        while self.restarts_s and now_s - self.restarts_s[0] > WINDOW_S:
            self.restarts_s.popleft()
        if len(self.restarts_s) == MAX_RESTARTS_IN_WINDOW:
            return None
        delay_s = pause_after(len(self.restarts_s) + 1, FIRST_BACKOFF_S, MAX_BACKOFF_S)
        self.restarts_s.append(now_s)
        return delay_s
