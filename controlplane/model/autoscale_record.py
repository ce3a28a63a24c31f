"""What a model's instances are scaled by, and how many there are to be: records in the state store."""

from math import floor, inf, isfinite

import msgspec

from controlplane.model.replica_kind import MAX_KINDS, MAX_REPLICAS, KindReplicas, ReplicaKind
from mesh.errors import ConfigurationError

POLICIES_PREFIX = "/penstock/autoscale/policies/"
"""Followed by the model's name; operators set these."""
SCALES_PREFIX = "/penstock/autoscale/scales/"
"""Followed by the model's name; the leading planner writes these, supervisors follow them."""


class AutoscalePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How one model is scaled: the service level that is held, what that may cost, and between which bounds."""

    model: str
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    """Limits of a request; None: any time will do. A request is within the SLO if it is within all of them."""
    share: float = 0.99
    """Of the requests that are to be within the SLO."""
    minimum: int = 1
    """Replicas that are kept at least. 0: scale to zero, requests then wait at the door for the first one."""
    maximum: int = 8
    price_per_hour: float = 0.0
    """Of one GPU."""
    budget_per_hour: float = inf
    """Of all replicas of this model together."""
    gpus: int = 1
    """Of one replica."""
    cold_start_s: float | None = None
    """From the order until a replica serves; None: as measured, and `DEFAULT_COLD_START_S` before that."""
    capacity_per_s: float | None = None
    """Requests per second that one replica sustains within the SLO; None: by its profile, or as seen."""
    interval_s: float = 60.0
    """Arrivals are counted over this time; decisions are made as often."""
    settle_s: float = 300.0
    """A replica is given up once none was needed for so long."""
    idle_s: float = 600.0
    """Without a request for so long, `minimum` 0 means none."""
    quantile: float = 0.9
    """Of the forecast's error: capacity is there for the rate that so many of the forecasts stayed below."""
    dry_run: bool = False
    """Decide and show, and change nothing."""
    kinds: tuple[ReplicaKind, ...] = ()
    """Of replicas, among which the cheapest mix is chosen; they say price, capacity and GPUs then. None: all alike."""

    @property
    def key(self) -> str:
        """The policy's key in the state store."""
        return POLICIES_PREFIX + self.model

    @property
    def most(self) -> int:
        """Replicas within the maximum, the budget and what there is of all kinds."""
        price = min((kind.replica_price_per_hour for kind in self.kinds), default=self.price_per_hour * self.gpus)
        affordable = self.maximum if price <= 0 or self.budget_per_hour == inf else floor(self.budget_per_hour / price)
        at_hand = sum(kind.maximum for kind in self.kinds) if self.kinds else self.maximum
        return min(self.maximum, affordable, at_hand)

    def checked(self) -> "AutoscalePolicy":
        """Itself. Raises `ConfigurationError` for what nothing can be scaled by."""
        name = f"the autoscale policy of {self.model}"
        if not self.model:
            raise ConfigurationError("an autoscale policy names its model")
        limits = (self.ttft_ms, self.tpot_ms, self.e2e_ms)
        if not any(limits) or any(limit is not None and not 0 < limit < inf for limit in limits):
            raise ConfigurationError(f"{name} needs a TTFT, TPOT or e2e limit, each above 0 ms")
        if not 0 < self.share < 1:
            raise ConfigurationError(f"{name}: the share of requests within the SLO is between 0 and 1: {self.share:g}")
        if not 0 <= self.minimum <= self.maximum <= MAX_REPLICAS or self.maximum < 1:
            raise ConfigurationError(
                f"{name} needs 0 <= minimum <= maximum and 1 <= maximum <= {MAX_REPLICAS}, got {self.minimum} and "
                f"{self.maximum}"
            )
        self._check_kinds(name)
        if self.gpus < 1 or not 0 <= self.price_per_hour < inf or not self.budget_per_hour >= 0:
            raise ConfigurationError(f"{name} needs gpus >= 1, a price and a budget of at least 0")
        if self.most < max(self.minimum, 1):
            raise ConfigurationError(
                f"{name}: the budget of {self.budget_per_hour:g} an hour pays for {self.most} replicas, fewer than "
                f"{max(self.minimum, 1)}; raise it, or lower the minimum"
            )
        if not all(0 < each < inf for each in (self.interval_s, self.idle_s)) or not 0 <= self.settle_s < inf:
            raise ConfigurationError(f"{name}: interval_s and idle_s are above 0 s, settle_s at least 0 s")
        for value in (self.cold_start_s, self.capacity_per_s):
            if value is not None and not (isfinite(value) and value > 0):
                raise ConfigurationError(f"{name}: cold_start_s and capacity_per_s are above 0, or not given: {value}")
        if not 0.5 <= self.quantile < 1:
            raise ConfigurationError(f"{name}: the forecast's quantile is at least 0.5 and below 1: {self.quantile:g}")
        return self

    def _check_kinds(self, name: str) -> None:
        if not self.kinds:
            return
        if len({kind.checked().key for kind in self.kinds}) < len(self.kinds) or len(self.kinds) > MAX_KINDS:
            raise ConfigurationError(f"{name} has at most {MAX_KINDS} kinds, each of another GPU or shape")
        if self.price_per_hour or self.gpus != 1 or self.capacity_per_s is not None:
            raise ConfigurationError(
                f"{name}: with kinds each says its price, its shape and what it sustains, leave out these three"
            )
        if sum(kind.maximum for kind in self.kinds) < self.minimum:
            raise ConfigurationError(
                f"{name}: its kinds have fewer replicas together than the minimum of {self.minimum}"
            )


class ScaleRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How many replicas a model is to have, by the planner that led when it was written."""

    model: str
    replicas: int
    leave_first: tuple[str, ...] = ()
    """Instances in the order in which they are to go, where some have to."""
    why: str = ""
    epoch: int = 0
    leader: str = ""
    kinds: tuple[KindReplicas, ...] = ()
    """Of which kinds; none: in whatever shape the model is served."""

    @property
    def key(self) -> str:
        """The record's key in the state store."""
        return SCALES_PREFIX + self.model

    def checked(self) -> "ScaleRecord":
        """Itself. Raises `ConfigurationError` for a number that no mesh has."""
        if not self.model or not 0 <= self.replicas <= MAX_REPLICAS:
            raise ConfigurationError(f"a scale names a model and 0 to {MAX_REPLICAS} replicas, got {self}")
        if self.kinds and sum(each.replicas for each in self.kinds) != self.replicas:
            raise ConfigurationError(f"a scale's kinds add up to its replicas, got {self}")
        return self
