"""How many tokens a key, or a tenant of tokens, may take within a calendar day or month (UTC), over all frontends.

What was taken is a counter that only grows: for each window the store has a number for each incarnation of a frontend,
and their sum is what is used (a G-Counter; Shapiro et al., INRIA RR-7506, 2011). A frontend writes its own number, so
that a write that was lost or came twice does no harm, and one that starts anew begins at zero beside what it had
written before. Tokens count when their request has ended, in the window of that moment.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from hashlib import sha256
from itertools import islice
from typing import Final

import msgspec

from mesh.errors import ConfigurationError
from mesh.invariants import invariants
from services.frontend.requests.api_keys import ApiKey

BUDGETS_PREFIX: Final = "/penstock/budgets/"
"""Followed by a hash of the tenant's name, which may have any characters; frontends write these."""
MAX_TENANTS: Final = 4096
"""With budgets: what they have used has to fit into the store, and into one listing of it."""
MAX_INCARNATIONS: Final = 64
"""That a record tells apart; those that wrote first beyond them are one sum. A frontend among these that lives and
writes again counts twice: with so many frontends a key may get less than its budget, never more."""


class Period(StrEnum):
    """What a budget is for: each begins at midnight, UTC."""

    DAY = "day"
    MONTH = "month"

    def window(self, unix_s: float) -> str:
        """The one that a moment is in. Later ones are greater."""
        return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d" if self is Period.DAY else "%Y-%m")

    def end(self, unix_s: float) -> datetime:
        """When the next one begins."""
        midnight = datetime.fromtimestamp(unix_s, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        if self is Period.DAY:
            return midnight + timedelta(days=1)
        return (midnight.replace(day=1) + timedelta(days=32)).replace(day=1)


class WindowUse(msgspec.Struct, frozen=True):
    """What was taken in one day or month."""

    window: str
    tokens: Mapping[str, int]
    """By the incarnations of frontends, who wrote last at the end."""
    former: int = 0
    """Of those that wrote before these."""

    def of_others(self, incarnation: str) -> int:
        """All but what this one has written."""
        return self.former + sum(self.tokens.values()) - self.tokens.get(incarnation, 0)

    def with_own(self, incarnation: str, window: str, tokens: int) -> "WindowUse":
        """With what this one has taken in that window; a later window than that is left as it is."""
        if window < self.window or (window == self.window and self.tokens.get(incarnation) == tokens):
            return self
        if window > self.window:
            return WindowUse(window, {incarnation: tokens})
        others = [(name, count) for name, count in self.tokens.items() if name != incarnation]
        beyond = max(0, len(others) + 1 - MAX_INCARNATIONS)
        former = self.former + sum(count for _, count in others[:beyond])
        return WindowUse(window, dict([*others[beyond:], (incarnation, tokens)]), former)


class BudgetRecord(msgspec.Struct, frozen=True):
    """What one tenant has used, in the state store, for all frontends."""

    tenant: str
    uses: Mapping[Period, WindowUse]
    budgets: Mapping[Period, float] = {}
    """In tokens, as who wrote last knew them: for who reads."""

    @property
    def key(self) -> str:
        """In the state store."""
        return key_of(self.tenant)

    def used(self, period: Period, unix_s: float) -> int:
        """In the present day or month."""
        use = self.uses.get(period)
        return 0 if use is None or use.window != period.window(unix_s) else use.of_others("")

    def is_past(self, now: Mapping[Period, str]) -> bool:
        """Whether nothing of it counts any more in these windows."""
        return all(use.window < now[period] for period, use in self.uses.items())

    def checked(self) -> None:
        """Raises `ConfigurationError` for counts that are none."""
        for use in self.uses.values():
            if min((use.former, *use.tokens.values())) < 0:
                raise ConfigurationError(f"what {self.tenant!r} has used cannot be negative")


def key_of(tenant: str) -> str:
    """Of its record, in the state store."""
    return BUDGETS_PREFIX + sha256(tenant.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def budgets_of(key: ApiKey) -> dict[Period, float]:
    """In tokens; periods without a budget are left out."""
    budgets = {Period.DAY: key.tokens_per_day, Period.MONTH: key.tokens_per_month}
    return {period: tokens for period, tokens in budgets.items() if tokens is not None}


@dataclass(frozen=True, slots=True)
class BudgetSpent:
    """A key has to wait for the next day or month."""

    period: Period
    tokens: float
    begins_anew: datetime
    retry_after_s: float


@dataclass(slots=True)
class _OwnUse:
    """What this frontend has let a tenant take, of the windows in which it last took anything."""

    budgets: Mapping[Period, float]
    taken: dict[Period, tuple[str, int]] = field(default_factory=dict)
    """By period: the window, and the tokens in it."""

    def is_past(self, now: Mapping[Period, str]) -> bool:
        return all(window < now[period] for period, (window, _) in self.taken.items())


class KeyBudgets:
    """What all keys with budgets have used, as far as this frontend knows, and what it has to tell the others."""

    def __init__(self, incarnation: str) -> None:
        """`incarnation`: this frontend's."""
        self._incarnation = incarnation
        self._own: dict[str, _OwnUse] = {}
        """By tenant."""
        self._records: dict[str, BudgetRecord] = {}
        """By tenant, as the store has them."""
        self._unwritten: dict[str, None] = {}
        """Tenants whose use the store does not have yet, in the order in which they took something."""
        self._swept = ""
        """The month in which that of others was forgotten."""

    def __len__(self) -> int:
        """Tenants of which something is to be written."""
        return len(self._unwritten)

    def reached(self, key: ApiKey, unix_s: float) -> BudgetSpent | None:
        """The budget of the key that is used up, the one that is to be waited for longest."""
        spent: BudgetSpent | None = None
        for period, tokens in budgets_of(key).items():
            if self.used(key.name, period, unix_s) >= tokens:
                end = period.end(unix_s)
                spent = BudgetSpent(period, tokens, end, end.timestamp() - unix_s)
        return spent

    def has_room(self, tenant: str) -> bool:
        """Whether what it takes can be counted: there may be too many others."""
        if tenant not in self._records and len(self._records) >= MAX_TENANTS:
            return False
        return tenant in self._own or len(self._own) < MAX_TENANTS

    def spend(self, key: ApiKey, tokens: int, unix_s: float) -> None:
        """A request with this key has ended and has taken so many tokens."""
        budgets = budgets_of(key)
        if not budgets or not tokens or not self.has_room(key.name):
            return
        own = self._own.setdefault(key.name, _OwnUse(budgets))
        own.budgets = budgets
        for period in Period:
            now = period.window(unix_s)
            window, before = own.taken.get(period, (now, 0))
            # A wall clock may step back; what was counted in a later window stays there.
            own.taken[period] = (now, tokens) if now > window else (window, before + tokens)
        self._unwritten[key.name] = None

    def used(self, tenant: str, period: Period, unix_s: float) -> int:
        """Tokens in the present day or month, at all frontends."""
        now = period.window(unix_s)
        own, record = self._own.get(tenant), self._records.get(tenant)
        window, used = ("", 0) if own is None else own.taken.get(period, ("", 0))
        used = used if window >= now else 0
        use = None if record is None else record.uses.get(period)
        return used if use is None or use.window < now else used + use.of_others(self._incarnation)

    def heard(self, tenant: str, record: BudgetRecord | None) -> None:
        """What the store has of a tenant now; None: nothing any more."""
        if record is None:
            self._records.pop(tenant, None)
        else:
            self._records[tenant] = record
        if tenant in self._own and self._is_missing(tenant, record):
            self._unwritten[tenant] = None

    def take_unwritten(self, most: int) -> list[str]:
        """Tenants whose use is to be written next, in the order in which they took something. `not_written` where it
        was not."""
        tenants = list(islice(self._unwritten, most))
        for tenant in tenants:
            del self._unwritten[tenant]
        return tenants

    def not_written(self, tenant: str) -> None:
        """To be tried again."""
        self._unwritten[tenant] = None

    def to_write(self, tenant: str, stored: BudgetRecord | None) -> BudgetRecord | None:
        """What the store is to have in the place of `stored`; None: it has all."""
        own = self._own.get(tenant)
        if own is None or not self._is_missing(tenant, stored):
            return None
        uses = {} if stored is None else dict(stored.uses)
        for period, (window, tokens) in own.taken.items():
            use = uses.get(period, WindowUse(window, {}))
            uses[period] = use.with_own(self._incarnation, window, tokens)
        return BudgetRecord(tenant, uses, own.budgets)

    def forget_past(self, unix_s: float, most: int) -> list[str]:
        """Once a month, forget those who have taken nothing since the last one ended. Returns keys of records that the
        store need not keep, at most so many at a time."""
        now = {period: period.window(unix_s) for period in Period}
        if self._swept == now[Period.MONTH]:
            return []
        for tenant in [tenant for tenant, own in self._own.items() if own.is_past(now)]:
            del self._own[tenant]
            self._unwritten.pop(tenant, None)
        past = list(islice((record.key for record in self._records.values() if record.is_past(now)), most))
        if len(past) < most:
            self._swept = now[Period.MONTH]
        return past

    @invariants
    def validate(self) -> None:
        """Check what must hold between two events. Raises `InvariantBroken`."""
        assert self._unwritten.keys() <= self._own.keys(), "what is to be written is known"
        assert len(self._own) <= MAX_TENANTS
        assert all(count > 0 for own in self._own.values() for _, count in own.taken.values())

    def _is_missing(self, tenant: str, record: BudgetRecord | None) -> bool:
        """Whether the store has less of what this frontend counted than there is. Later windows hide former ones."""
        for period, (window, tokens) in self._own[tenant].taken.items():
            use = None if record is None else record.uses.get(period)
            if use is None or use.window < window:
                return True
            if use.window == window and use.tokens.get(self._incarnation, 0) != tokens:
                return True
        return False
