"""How much each key may do: rates, and requests at once, over all frontends of the mesh.

Each frontend decides by itself, by what it has let in and what it has heard of the others (`shared_limits`). What they
let in before it heard is a debt, which is waited for like its own: over the long run a key has its rate once, whatever
frontends it asks. In between the frontends together let in at most what each of them may let in at once, and what the
rate brings until they hear of each other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import msgspec
from msgspec.structs import replace

from services.frontend.requests.api_keys import ApiKey

MAX_BUCKETS: Final = 65_536
"""Keys and tenants of tokens whose rates are counted; beyond them the one that was seen first begins anew."""


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
        self._fill(now_s)
        # Refills add up with rounding errors: a wait of exactly the announced time must suffice.
        if self._level >= 1 - 1e-9:
            self._level -= 1
            return 0.0
        return (1 - self._level) * 60 / self.per_min

    def spend(self, events: float, now_s: float) -> None:
        """So many have happened, allowed or not: what is over is waited for by those that come."""
        self._fill(now_s)
        self._level -= events

    def wait_s(self, now_s: float) -> float:
        """Seconds until nothing of what was spent is to be waited for; 0 if nothing is."""
        self._fill(now_s)
        return 0.0 if self._level > -1e-6 else -self._level * 60 / self.per_min

    def _fill(self, now_s: float) -> None:
        elapsed_s = 0.0 if self._filled_s is None else max(0.0, now_s - self._filled_s)
        self._filled_s = now_s
        self._level = min(self.burst, self._level + elapsed_s * self.per_min / 60)


@dataclass(frozen=True, slots=True)
class LimitReached:
    """A limit of the key forbids the request now."""

    limit: str
    """In words, for the client."""
    retry_after_s: float


class KeyUse(msgspec.Struct, frozen=True):
    """What one frontend has let in with a key."""

    requests: int = 0
    """Since it started."""
    tokens: int = 0
    """Likewise."""
    running: int = 0
    """Now."""
    requests_per_min: float | None = None
    """The key's bounds as that frontend knows them: another may have to count before it has met the key."""
    tokens_per_min: float | None = None
    is_base: bool = False
    """Others begin to count from here: it was so when that frontend met them, and may be a day's use."""


_NOTHING: Final = KeyUse()


class KeyLimits:
    """Rate and concurrency of every key that was met."""

    def __init__(self) -> None:
        self._requests: dict[str, TokenBucket] = {}
        self._tokens: dict[str, TokenBucket] = {}
        self._own: dict[str, KeyUse] = {}
        """By the key's name, what this frontend has let in with it."""
        self._others: dict[str, dict[str, KeyUse]] = {}
        """By frontend, as it was last heard of."""
        self._unsent: dict[str, dict[str, bool]] = {}
        """By frontend, the names of whose use it has not been told the latest, in the order that they are told in; and
        whether it has not been told anything of them, and is to begin to count there."""

    def enter(self, key: ApiKey, now_s: float) -> LimitReached | None:
        """A request begins, unless a limit is reached. Each one that begins must `leave`."""
        if key.concurrency is not None and self.running(key.name) >= key.concurrency:
            return LimitReached(f"{key.concurrency} concurrent requests", 1.0)
        if key.tokens_per_min is not None:
            wait_s = _bucket(self._tokens, key.name, key.tokens_per_min).wait_s(now_s)
            if wait_s > 0:
                return LimitReached(f"{key.tokens_per_min:g} tokens per minute", wait_s)
        if key.requests_per_min is not None:
            wait_s = _bucket(self._requests, key.name, key.requests_per_min).take(now_s)
            if wait_s > 0:
                return LimitReached(f"{key.requests_per_min:g} requests per minute", wait_s)
        self._use(key, requests=1, running=1)
        return None

    def leave(self, key: ApiKey) -> None:
        """A request that `enter` let in is over."""
        self._use(key, running=-1)

    def spend(self, key: ApiKey, tokens: int, now_s: float) -> None:
        """A request with this key has taken so many tokens."""
        if key.tokens_per_min is not None and tokens:
            _bucket(self._tokens, key.name, key.tokens_per_min).spend(tokens, now_s)
            self._use(key, tokens=tokens)

    def running(self, name: str) -> int:
        """Requests with the key that are under way, here and, as far as was heard, elsewhere."""
        return self._own.get(name, _NOTHING).running + sum(
            uses.get(name, _NOTHING).running for uses in self._others.values()
        )

    def frontend_joined(self, frontend: str) -> None:
        """Another frontend, by its incarnation, is to be told of everything."""
        self._unsent[frontend] = dict.fromkeys(self._own, True)

    def frontend_left(self, frontend: str) -> None:
        """What ran there runs no more."""
        self._unsent.pop(frontend, None)
        self._others.pop(frontend, None)

    def knows(self, frontend: str) -> bool:
        """Whether it has joined and not left."""
        return frontend in self._unsent

    def is_behind(self, frontend: str) -> bool:
        """Whether there is something that it has not been told."""
        return bool(self._unsent.get(frontend))

    def unsent_for(self, frontend: str, most: int) -> dict[str, KeyUse]:
        """By the names of keys, at most so many: what it is told next. `not_sent` where it did not take it."""
        unsent = self._unsent.get(frontend, {})
        names = list(islice(unsent, most))
        return {name: replace(self._own[name], is_base=unsent.pop(name)) for name in names if name in self._own}

    def not_sent(self, frontend: str, uses: Mapping[str, KeyUse]) -> None:
        """Tell it again. A frontend that has left is forgotten."""
        unsent = self._unsent.get(frontend)
        if unsent is not None:
            unsent.update((name, use.is_base) for name, use in uses.items())

    def heard(self, frontend: str, uses: Mapping[str, KeyUse], now_s: float) -> None:
        """Another frontend, which is known, tells what it has let in with keys."""
        assert frontend in self._unsent, f"{frontend} is not known"
        others = self._others.setdefault(frontend, {})
        for name, use in uses.items():
            before = use if use.is_base else others.get(name, _NOTHING)
            _owe(self._requests, name, use.requests_per_min, use.requests, before.requests, now_s)
            _owe(self._tokens, name, use.tokens_per_min, use.tokens, before.tokens, now_s)
            if name not in others and len(others) >= MAX_BUCKETS:
                del others[next(iter(others))]
            others[name] = use

    def _use(self, key: ApiKey, *, requests: int = 0, tokens: int = 0, running: int = 0) -> None:
        if key.requests_per_min is None and key.tokens_per_min is None and key.concurrency is None:
            return
        name, use = key.name, self._own.get(key.name)
        if use is None:
            use = _NOTHING
            if len(self._own) >= MAX_BUCKETS:
                self._forget_one()
        self._own[name] = replace(
            use,
            requests=use.requests + requests,
            tokens=use.tokens + tokens,
            running=use.running + running,
            requests_per_min=key.requests_per_min,
            tokens_per_min=key.tokens_per_min,
        )
        for unsent in self._unsent.values():
            unsent.setdefault(name, False)

    def _forget_one(self) -> None:
        """The first with which nothing runs; others begin to count its use anew if it comes back."""
        name = next((name for name, use in self._own.items() if not use.running), None)
        if name is None:
            return  # so many requests do not run at once
        del self._own[name]
        for unsent in self._unsent.values():
            unsent.pop(name, None)


def _owe(
    buckets: dict[str, TokenBucket], name: str, per_min: float | None, used: int, used_before: int, now_s: float
) -> None:
    """What another frontend has let in since it was last heard of is waited for here."""
    if per_min is None:
        return
    # Less than before: it had to forget the key, and counts anew.
    more = used - used_before if used >= used_before else used
    if more:
        _bucket(buckets, name, per_min).spend(more, now_s)


def _bucket(buckets: dict[str, TokenBucket], name: str, per_min: float) -> TokenBucket:
    """The key's; another one when its rate has been changed."""
    bucket = buckets.get(name)
    if bucket is None or bucket.per_min != per_min:
        if bucket is None and len(buckets) >= MAX_BUCKETS:
            del buckets[next(iter(buckets))]
        bucket = buckets[name] = TokenBucket(per_min)
    return bucket
