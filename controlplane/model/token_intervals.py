"""How long decoding requests wait from one token to the next: Arrow's measure of a decode instance (section 4.3)."""

from bisect import bisect_left
from collections.abc import Sequence

SLICE_MS = 500
SLICES = 10
"""The window is five seconds."""


class TokenIntervals:
    """The mean over a sliding window, in constant memory. No clock: time is whatever the caller's is, in milliseconds.

    Times are rounded to whole microseconds, so that adding a run of steps at once and adding them one by one give
    equal means. An interval counts when its token comes.
    """

    __slots__ = ("_latest", "_tokens", "_tokens_total", "_waited_total_us", "_waited_us")

    def __init__(self) -> None:
        self._latest = 0
        self._tokens = [0] * SLICES
        self._waited_us = [0] * SLICES
        self._tokens_total = self._waited_total_us = 0
        """Of all slices: reports ask for the mean more often than slices pass."""

    def add(self, requests: int, started_ms: float, ended_ms: float, tokens_each: int = 1) -> None:
        """A token (or several) for each of so many requests, at `ended_ms`, the one before having come at `started_ms`.
        With no requests, only time passes."""
        self._add(requests * tokens_each, requests * (_us(ended_ms) - _us(started_ms)), int(ended_ms // SLICE_MS))

    def add_run(self, requests: int, started_ms: float, ends_ms: Sequence[float]) -> None:
        """The same for consecutive steps that end at `ends_ms`, ascending, each with a token for every request."""
        first, count, last_slice = 0, len(ends_ms), int(ends_ms[-1] // SLICE_MS)
        while first < count:
            number = int(ends_ms[first] // SLICE_MS)
            stop = count if number == last_slice else bisect_left(ends_ms, (number + 1) * SLICE_MS, first)
            ended_ms = ends_ms[stop - 1]
            self._add(requests * (stop - first), requests * (_us(ended_ms) - _us(started_ms)), number)
            first, started_ms = stop, ended_ms

    def mean_ms(self) -> float:
        """Over the window that ends with the latest time seen; 0 without a token in it."""
        return self._waited_total_us / self._tokens_total / 1000 if self._tokens_total else 0.0

    def _add(self, tokens: int, waited_us: int, number: int) -> None:
        """Time that goes backwards counts as the latest seen."""
        if number > self._latest:
            for passed in range(max(self._latest, number - SLICES) + 1, number + 1):
                place = passed % SLICES
                self._tokens_total -= self._tokens[place]
                self._waited_total_us -= self._waited_us[place]
                self._tokens[place] = self._waited_us[place] = 0
            self._latest = number
        self._tokens_total += tokens
        self._waited_total_us += waited_us
        self._tokens[self._latest % SLICES] += tokens
        self._waited_us[self._latest % SLICES] += waited_us


def _us(time_ms: float) -> int:
    return round(1000 * time_ms)
