"""Makes a predicted range hold what it promises: widened or narrowed by what the latest finished requests showed."""

from collections import deque
from typing import ClassVar, Final

import numpy as np

from controlplane.prediction.length_quantiles import QUANTILES, Floats, LengthQuantiles

REMEMBERED_REQUESTS: Final = 300
FEWEST_REQUESTS: Final = 20
"""Before as many have ended a range stays as it is."""
_LOG_MOST: Final = 10.0


class ConformalBand:
    """Conformalized quantile regression (Romano, Patterson and Candes 2019), each end by itself, over a
    window of the requests that ended last: what is promised holds on average for requests like these. Counted in
    logarithms and in widths of the range, because what is long or uncertain is missed by more."""

    PARTS: ClassVar[tuple[str, ...]] = ("counts", "low", "high")

    def __init__(self) -> None:
        self._low: deque[Floats] = deque(maxlen=REMEMBERED_REQUESTS)
        self._high: deque[Floats] = deque(maxlen=REMEMBERED_REQUESTS)
        self._shifts: tuple[float, float] | None = None

    def adjusted(self, raw: LengthQuantiles) -> LengthQuantiles:
        """The ranges moved at both ends; the middle stays in them."""
        low, high = self._shift()
        widths = raw.log_widths
        lows = np.minimum(raw.low * np.exp(-low * widths), raw.median)
        highs = np.maximum(raw.high * np.exp(np.minimum(high * widths, _LOG_MOST)), raw.median)
        return LengthQuantiles.of_columns(np.stack([lows, raw.median, highs], axis=1))

    def ended(self, raw: LengthQuantiles, remaining_tokens: Floats) -> None:
        """A request has ended of which these ranges, not adjusted, were said while it ran."""
        self._low.append(np.log(raw.low / remaining_tokens) / raw.log_widths)
        self._high.append(np.log(remaining_tokens / raw.high) / raw.log_widths)
        self._shifts = None

    def state(self) -> dict[str, Floats]:
        """By how many widths each end was missed (negative: with so much to spare), request by request, and how many
        of them each request has."""
        counts = np.array([len(scores) for scores in self._low], np.float64)
        return {"counts": counts, "low": _joined(self._low), "high": _joined(self._high)}

    def restore(self, state: dict[str, Floats]) -> None:
        """Go on from `state`. Raises ValueError where it contradicts itself."""
        ends = np.cumsum(state["counts"].astype(np.int64))
        if not len(state["low"]) == len(state["high"]) == int(state["counts"].sum()):
            raise ValueError("a band needs as many scores of each end as its requests have")
        if len(ends):
            self._low.extend(np.split(state["low"], ends[:-1]))
            self._high.extend(np.split(state["high"], ends[:-1]))
        self._shifts = None

    def _shift(self) -> tuple[float, float]:
        if len(self._low) < FEWEST_REQUESTS:
            return 0.0, 0.0
        if self._shifts is None:
            self._shifts = _end(self._low, 1 - QUANTILES[0]), _end(self._high, QUANTILES[-1])
        return self._shifts


def _joined(scores: deque[Floats]) -> Floats:
    return np.concatenate(scores) if scores else np.zeros(0)


def _end(scores: deque[Floats], share: float) -> float:
    """The score that this share of the samples stays below; of n samples the ceil((n + 1) share)-th."""
    values = np.concatenate(scores)
    rank = min(len(values), int(np.ceil((len(values) + 1) * share)))
    return float(np.partition(values, rank - 1)[rank - 1])
