"""What operators are shown of a model that is scaled (pure)."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from controlplane.model.autoscale_record import AutoscalePolicy
from controlplane.model.replica_kind import KindReplicas

Record = TypeVar("Record", AutoscalePolicy, "AutoscaleStatus")

STATUS_PREFIX = "/penstock/autoscale/status/"


class AutoscaleStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """As of the last decision."""

    model: str
    wanted: int
    serving: int
    rate_per_s: float = 0.0
    """Of the last interval."""
    expected_per_s: float = 0.0
    upper_per_s: float = 0.0
    """Of the highest rate of the time ahead: what is expected, and what capacity is kept for."""
    predictor: str = ""
    forecast_error: float = 0.0
    """Mean relative error of this predictor's last forecasts."""
    capacity_per_s: float = 0.0
    """Of one replica; 0: not known yet."""
    cold_start_s: float = 0.0
    waiting: int = 0
    """Requests that no replica works on yet, those at the door included."""
    kept_share: float | None = None
    """Of the last interval's ended requests: within the SLO. None: none ended."""
    why: str = ""
    refused: str = ""
    """Why the actuator does not give what is wanted; empty: it does, or it is under way."""
    dry_run: bool = False
    history_s: float = 0.0
    """Of the rates that the forecast rests on."""
    kinds: tuple[KindReplicas, ...] = ()
    """What is wanted of each kind, where the policy names some."""
    cost_per_hour: float = 0.0
    """Of all of these."""


def known_fields(kind: type[Record], told: Mapping[str, Any]) -> Record:
    """What a planner tells, which may be of another release: fields that are unknown here are left out. Raises
    `msgspec.ValidationError` for values that are none."""
    return msgspec.convert({name: told[name] for name in kind.__struct_fields__ if name in told}, kind)


def next_step(policy: AutoscalePolicy, status: AutoscaleStatus | None) -> str:
    """What the autoscaler will do next, in words."""
    if status is None:
        return f"decides within {policy.interval_s:g} s"
    more = status.wanted - status.serving
    if more > 0:
        would = "would start" if policy.dry_run else "starts"
        return f"{would} {more} more, which serve about {status.cold_start_s:.0f} s after the order"
    if more < 0:
        return f"{'would drain' if policy.dry_run else 'drains'} {-more}, the least loaded first"
    return f"nothing until it decides again, every {policy.interval_s:g} s"
