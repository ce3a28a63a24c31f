"""How long to wait before trying again: twice as long after each failure in a row, up to a bound (pure)."""

from collections.abc import Callable
from typing import Final

FIRST_S: Final = 0.05
LONGEST_S: Final = 1.0
_MOST_DOUBLINGS: Final = 32
"""Keeps the power a finite number, however long something fails."""


def pause_after(failures: int, first_s: float, longest_s: float) -> float:
    """Seconds to wait after this many failures in a row; 0 after none."""
    if failures < 1:
        return 0.0
    return min(longest_s, first_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS))


class Backoff:
    """Counts the failures in a row of one thing that is tried again and again."""

    def __init__(
        self, first_s: float = FIRST_S, longest_s: float = LONGEST_S, draw: Callable[[], float] | None = None
    ) -> None:
        """`draw` gives random numbers from 0 to 1: each pause is shortened by up to half, so that those who failed
        together do not come back together. None: pauses have their full length.

        This is the "equal jitter" of AWS's article Exponential Backoff And Jitter (2015). Its "full jitter" spreads
        retries better, but may try again at once what has just failed.
        """
        assert 0 <= first_s <= longest_s, (first_s, longest_s)
        self._first_s = first_s
        self._longest_s = longest_s
        self._draw = draw
        self._failures = 0

    def next_s(self) -> float:
        """Count a failure; the seconds to wait after it."""
        self._failures += 1
        pause_s = pause_after(self._failures, self._first_s, self._longest_s)
        return pause_s if self._draw is None else pause_s * (0.5 + 0.5 * self._draw())

    def reset(self) -> None:
        """It has worked: the next pause is a first one."""
        self._failures = 0
