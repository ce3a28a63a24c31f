"""What a single API key may ask for. Pure: time is an argument."""

from dataclasses import dataclass, field

from services.frontend.requests.api_keys import ApiKey


@dataclass(slots=True)
class TokenBucket:
    """Allows `per_min` events a minute, in bursts of up to as many as ten seconds bring (at least one)."""

    per_min: float
    _level: float = field(init=False)
    _filled_s: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._level = self.burst

    @property
    def burst(self) -> float:
        """Events that may come at once after a pause."""
        return max(1.0, self.per_min / 6)

    def take(self, now_s: float) -> float:
        """0 if an event may happen now, which it then has; otherwise the seconds until one may."""
        elapsed_s = 0.0 if self._filled_s is None else max(0.0, now_s - self._filled_s)
        self._filled_s = now_s
        self._level = min(self.burst, self._level + elapsed_s * self.per_min / 60)
        # Refills add up with rounding errors: a wait of exactly the announced time must suffice.
        if self._level >= 1 - 1e-9:
            self._level -= 1
            return 0.0
        return (1 - self._level) * 60 / self.per_min


@dataclass(frozen=True, slots=True)
class LimitReached:
    """Not now."""

    limit: str
    retry_after_s: float


class KeyLimits:
    """Rate and concurrency of every key; one entry for each key of the file."""

    def __init__(self) -> None:
        self._buckets: dict[str, TokenBucket] = {}
        self._running: dict[str, int] = {}

    def enter(self, key: ApiKey, now_s: float) -> LimitReached | None:
        """A request begins, unless a limit is reached. Each one that begins must `leave`."""
        running = self._running.get(key.name, 0)
        if key.concurrency is not None and running >= key.concurrency:
            return LimitReached(f"{key.concurrency} concurrent requests", 1.0)
        if key.requests_per_min is not None:
            bucket = self._buckets.setdefault(key.name, TokenBucket(key.requests_per_min))
            wait_s = bucket.take(now_s)
            if wait_s > 0:
                return LimitReached(f"{key.requests_per_min:g} requests per minute", wait_s)
        self._running[key.name] = running + 1
        return None

    def leave(self, key: ApiKey) -> None:
        """A request that had entered is over."""
        self._running[key.name] -= 1
