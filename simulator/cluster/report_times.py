"""When an instance reports, and which of its reports somebody may still see."""

from bisect import bisect_right
from collections.abc import Sequence
from math import floor
from typing import Protocol

EARLY_MS = 1e-6
"""Bounds are this much too early, so that rounding never makes them too late."""


class ReportTimes(Protocol):
    """When the reports of one instance leave it; each arrives the same delay later.

    A report that a later one overtakes before anybody looks at the table changes nothing, so only those are made that
    `seen_at` and `in_flight` name.
    """

    def seen_at(self, now_ms: float) -> float:
        """When the latest report left that has arrived by now; below 0: none has."""

    def in_flight(self, after_ms: float, now_ms: float) -> Sequence[float]:
        """When reports left, later than `after_ms`, that have not arrived by now and may be the latest then."""

    def next_seen(self, after_ms: float) -> float:
        """No report that leaves later than `after_ms` arrives before this."""


class Grid:
    """Reports at phase + k x interval, k = 0, 1..."""

    def __init__(self, interval_ms: float, delay_ms: float, phase_ms: float) -> None:
        self._interval_ms = interval_ms
        self._delay_ms = delay_ms
        self._phase_ms = phase_ms

    def seen_at(self, now_ms: float) -> float:
        """See `ReportTimes`."""
        return self._number(now_ms - self._delay_ms) * self._interval_ms + self._phase_ms

    def in_flight(self, after_ms: float, now_ms: float) -> Sequence[float]:
        """See `ReportTimes`."""
        first, last = self._number(max(after_ms, now_ms - self._delay_ms)) + 1, self._number(now_ms)
        times = (number * self._interval_ms + self._phase_ms for number in range(max(first, 0), last + 1))
        return [sent_ms for sent_ms in times if after_ms < sent_ms <= now_ms]

    def next_seen(self, after_ms: float) -> float:
        """See `ReportTimes`."""
        number = max(self._number(after_ms) + 1, 0)
        return number * self._interval_ms + self._phase_ms + self._delay_ms - EARLY_MS

    def _number(self, at_ms: float) -> int:
        """Of the last report to leave by then."""
        return floor((at_ms - self._phase_ms) / self._interval_ms)


class JustInTime:
    """A report leaves exactly a delay before each of the `looks_ms`, which may become more while time passes.

    A look that becomes known less than a delay before it comes may see a newer state than one a delay old.
    """

    def __init__(self, delay_ms: float, looks_ms: Sequence[float]) -> None:
        self._delay_ms = delay_ms
        self._looks_ms = looks_ms
        """Ascending; shared by all instances."""

    def seen_at(self, now_ms: float) -> float:
        """See `ReportTimes`."""
        return now_ms - self._delay_ms

    def in_flight(self, after_ms: float, now_ms: float) -> Sequence[float]:
        """See `ReportTimes`."""
        first, last = (bisect_right(self._looks_ms, until_ms) for until_ms in (now_ms, now_ms + self._delay_ms))
        times = [look_ms - self._delay_ms for look_ms in self._looks_ms[first:last]]
        return [sent_ms for sent_ms in times if after_ms < sent_ms <= now_ms]

    def next_seen(self, after_ms: float) -> float:
        """See `ReportTimes`."""
        return after_ms + self._delay_ms - EARLY_MS
