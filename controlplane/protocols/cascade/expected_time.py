"""What something is expected to take, from what it took lately, seen to its end or not."""

from collections import deque
from math import inf
from typing import Final, NamedTuple

REMEMBERED: Final = 16
"""How many of the latest times an expectation rests on."""
MAX_AGE_S: Final = 120.0
"""What is older says nothing any more."""
DOUBT_AFTER_S: Final = 5.0
"""For each time that is known: an expectation is doubted when nothing has been begun for so long."""
_HALF: Final = 0.5 + 1e-9
"""Above the products of fractions that should be one half."""


class _Seen(NamedTuple):
    seconds: float
    is_cut: bool
    """It took at least so long."""
    at_s: float


class ExpectedTime:
    """The median of the latest times; of those that were not seen to their end it is known that they are longer
    (Kaplan and Meier, Nonparametric estimation from incomplete observations, JASA 1958).

    A deadline may keep it from being begun, and what is not begun is not measured. So an expectation is doubted after
    a while, which lets it be begun again: the sooner, the less it rests on; and times that are too old are forgotten.
    All times are in seconds, `now_s` on one clock of the caller.
    """

    __slots__ = ("_lately_s", "_seen")

    def __init__(self) -> None:
        self._seen: deque[_Seen] = deque(maxlen=REMEMBERED)
        self._lately_s = -inf

    def begins(self, now_s: float) -> None:
        """Another one is begun at `now_s`: the expectation is being tried, and need not be doubted yet."""
        self._lately_s = now_s

    def took(self, seconds: float, now_s: float) -> None:
        """One was seen to its end at `now_s`, after so many `seconds`."""
        self._lately_s = now_s
        self._seen.append(_Seen(seconds, False, now_s))

    def took_at_least(self, seconds: float, now_s: float) -> None:
        """One was cut before its end. If it was expected to take longer yet, that says nothing."""
        self._lately_s = now_s
        if seconds > self.median_s(now_s):
            self._seen.append(_Seen(seconds, True, now_s))

    def expected_s(self, now_s: float) -> float:
        """0 where nothing is known, or what is known is to be tried anew."""
        is_doubted = now_s - self._lately_s >= DOUBT_AFTER_S * len(self._seen)
        return 0.0 if is_doubted else self.median_s(now_s)

    def median_s(self, now_s: float) -> float:
        """0 where nothing is known; the longest time there is where more than half took longer than is known."""
        self._forget(now_s)
        left = 1.0
        ordered = sorted(self._seen)
        for place, seen in enumerate(ordered):
            if not seen.is_cut:
                left *= 1 - 1 / (len(ordered) - place)
                if left <= _HALF:
                    return seen.seconds
        return ordered[-1].seconds if ordered else 0.0

    def _forget(self, now_s: float) -> None:
        while self._seen and now_s - self._seen[0].at_s > MAX_AGE_S:
            self._seen.popleft()
