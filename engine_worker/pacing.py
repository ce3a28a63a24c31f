"""When the next load report is due. Pure."""

import math


class Pacing:
    """After a step, but not within `interval_s` of the last report; without steps, every `heartbeat_s`."""

    def __init__(self, interval_s: float, heartbeat_s: float) -> None:
        self._interval_s = interval_s
        self._heartbeat_s = heartbeat_s
        self._last_sent_s = -math.inf
        self._is_dirty = False
        self._is_urgent = False

    def note_change(self) -> bool:
        """There is news. Returns whether it is the first since the last report."""
        was_dirty, self._is_dirty = self._is_dirty, True
        return not was_dirty

    def note_urgent(self) -> None:
        """There is news that must not wait."""
        self._is_urgent = True

    def due_in_s(self, now_s: float) -> float:
        """Seconds until the next report; 0 or less when it is due."""
        if self._is_urgent:
            return 0.0
        pause_s = self._interval_s if self._is_dirty else self._heartbeat_s
        return self._last_sent_s + pause_s - now_s

    def note_sent(self, now_s: float) -> None:
        """A report was sent; no change waits for one any more."""
        self._last_sent_s = now_s
        self._is_dirty = self._is_urgent = False
