"""What rate of requests comes next, and how sure that is (pure).

Several predictors run side by side: the rate stays, it goes on as it moved lately, it moves as it did a day or a week
ago at the same time. What each has got wrong lately is known, so the one that has erred least is believed, and its own
errors say how far the truth may lie above it.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Final

from mesh.invariants import invariants

DAY_S: Final = 86_400.0
WEEK_S: Final = 7 * DAY_S
KEPT_S: Final = 2 * WEEK_S
KEPT_BUCKETS: Final = 40_320
"""Of arrivals: two weeks of minutes."""
LEVEL_S: Final = 300.0
"""The present rate is the mean of so long, or of `LEVEL_BUCKETS` at the least."""
LEVEL_BUCKETS: Final = 3
TREND_LEVELS: Final = 2.0
"""A trend is measured over so many times the time of a level."""
MEMORY: Final = 720
"""Forecasts whose errors are remembered for each predictor."""
TRUSTED: Final = 30
"""A predictor needs so many errors before it is believed over the simplest."""
FLOOR_PER_S: Final = 1e-3
"""Below this, rates are taken to be the same: a ratio to nothing says nothing."""
UNKNOWN_ERROR: Final = 0.3
"""Relative: added to a forecast of which too little is known."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The highest rate of the time ahead, in requests per second."""

    expected_per_s: float
    upper_per_s: float
    """At the quantile that was asked for."""
    predictor: str
    relative_error: float
    """Mean of |forecast / truth - 1| of this predictor's last forecasts; 0 while there are none."""


class RateForecaster:
    """Of one model. Tell each bucket's rate as it ends; ask for the highest rate of the next `ahead` buckets."""

    def __init__(self, bucket_s: float, ahead: int) -> None:
        """`ahead`: how far the forecasts look that errors are kept of, in buckets."""
        assert bucket_s > 0
        assert ahead >= 1
        self._bucket_s = bucket_s
        self._ahead = ahead
        self._level = max(LEVEL_BUCKETS, round(LEVEL_S / bucket_s))
        self._rates: deque[float] = deque(maxlen=min(KEPT_BUCKETS, max(2, round(KEPT_S / bucket_s))))
        self._pending: deque[Mapping[str, float]] = deque()
        """Logarithms of what was forecast after each of the last `ahead` buckets, oldest first."""
        self._errors: dict[str, deque[float]] = {name: deque(maxlen=MEMORY) for name in self._predictors}
        self._since_gap: int | None = None
        """Buckets since a time so long that nobody observed; None: that is long ago, or was never."""

    @property
    def buckets(self) -> int:
        """How many are remembered."""
        return len(self._rates)

    @property
    def rates(self) -> tuple[float, ...]:
        """Of the remembered buckets, oldest first."""
        return tuple(self._rates)

    @property
    def last_per_s(self) -> float:
        """The last bucket's rate."""
        return self._rates[-1]

    def add(self, rate_per_s: float) -> None:
        """The rate of the bucket that has just ended."""
        self._rates.append(rate_per_s)
        if self._since_gap is not None:
            self._since_gap = self._since_gap + 1 if self._since_gap < 2 * self._level else None
        if len(self._pending) == self._ahead:
            truth = log(max(max(self._last(self._ahead)), FLOOR_PER_S))
            for name, said in self._pending.popleft().items():
                self._errors[name].append(truth - said)
        self._pending.append({name: log(max(value, FLOOR_PER_S)) for name, value in self._predictions().items()})

    def recall(self, rates_per_s: Sequence[float]) -> None:
        """Begin with these buckets, oldest first: as if each had been added, errors included."""
        assert not self._rates, "what is recalled comes first"
        kept = rates_per_s[-(self._rates.maxlen or 0) :]
        judged = min(len(kept), MEMORY + self._ahead)  # errors of older forecasts are forgotten by now
        self._rates.extend(kept[: len(kept) - judged])
        for rate_per_s in kept[len(kept) - judged :]:
            self.add(rate_per_s)

    def skip(self, buckets: int) -> None:
        """So many have passed that nobody observed: each is taken to have been as a day before, or else as the last
        one. No forecast is held to that; and after more than a level of them the level is what comes from now on."""
        if not buckets or not self._rates:
            return
        day = round(DAY_S / self._bucket_s)
        for _ in range(min(buckets, self._rates.maxlen or 0)):
            self._rates.append(self._rates[-day] if 0 < day <= len(self._rates) else self._rates[-1])
        self._pending.clear()
        if buckets > self._level:
            self._since_gap = 0

    def forecast(self, quantile: float) -> Forecast:
        """The highest rate of the next `ahead` buckets. Nothing seen so far means nothing expected."""
        predictions = self._predictions()
        if not predictions:
            return Forecast(0.0, 0.0, "none", 0.0)
        name = min(predictions, key=lambda name: (self._mean_error(name), name != "level"))
        errors = sorted(self._errors[name])
        if len(errors) < TRUSTED:
            expected = predictions[name]
            return Forecast(expected, expected * (1 + UNKNOWN_ERROR), name, 0.0)
        middle, upper = (errors[min(len(errors) - 1, int(part * len(errors)))] for part in (0.5, quantile))
        return Forecast(
            predictions[name] * exp(middle), predictions[name] * exp(upper), name, self._relative_error(errors)
        )

    @invariants
    def validate(self) -> None:
        """Check the bounds of what is remembered. Raises `InvariantBroken`."""
        assert len(self._pending) <= self._ahead
        assert all(rate >= 0 for rate in self._last(1))
        assert all(len(errors) <= MEMORY for errors in self._errors.values())

    # -- predictors

    @property
    def _predictors(self) -> Mapping[str, Callable[[], float | None]]:
        return {
            "level": self._by_level,
            "trend": self._by_trend,
            "day": lambda: self._as_before(DAY_S),
            "week": lambda: self._as_before(WEEK_S),
        }

    def _predictions(self) -> dict[str, float]:
        if not self._rates:
            return {}
        return {name: value for name, by in self._predictors.items() if (value := by()) is not None}

    def _by_level(self) -> float:
        """Only of what was observed, where that is anything."""
        return _mean(self._last(min(self._level, self._since_gap) if self._since_gap else self._level))

    def _by_trend(self) -> float | None:
        """A straight line through the last level and the one before it; never below zero."""
        if len(self._rates) < 2 * self._level or self._since_gap is not None:
            return None
        recent = self._last(2 * self._level)
        before, now = _mean(recent[: self._level]), _mean(recent[self._level :])
        slope = (now - before) / self._level
        return max(0.0, now + slope * (self._ahead + self._level / 2))

    def _as_before(self, period_s: float) -> float | None:
        """The highest of the same time a period ago, times how the level differs from that time's."""
        period = round(period_s / self._bucket_s)
        start = len(self._rates) - period
        if period < self._level or start < self._level or period < self._ahead:
            return None
        then = _mean([self._rates[place] for place in range(start - self._level, start)])
        # The rate that follows is smoothed: the level's noise comes in by the errors.
        half = self._level // 2
        ahead = [
            _mean([self._rates[place] for place in range(max(0, at - half), min(len(self._rates), at + half + 1))])
            for at in (start + self._ahead // 2, start + self._ahead)
            if at < len(self._rates)
        ]
        return self._by_level() * max(ahead) / max(then, FLOOR_PER_S)

    def _last(self, count: int) -> list[float]:
        size = len(self._rates)
        return [self._rates[place] for place in range(max(0, size - count), size)]

    def _mean_error(self, name: str) -> float:
        errors = self._errors[name]
        if len(errors) < TRUSTED:
            return float("inf")
        middle = sorted(errors)[len(errors) // 2]
        return sum(abs(error - middle) for error in errors) / len(errors)

    @staticmethod
    def _relative_error(errors: list[float]) -> float:
        middle = errors[len(errors) // 2]
        return sum(abs(exp(middle - error) - 1) for error in errors) / len(errors)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
