"""One model's instances as the rescheduler may see them, and which it may not. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from controlplane.model.step_costs import StepCosts
from controlplane.policies.rescheduling.decode_load import DecodeLoad
from controlplane.policies.rescheduling.parameters import ReschedulerParameters
from controlplane.policies.rescheduling.problem import DecodeInstance

MISSED_REPORTS = 3
"""Intervals without a report of its requests after which an instance is left out."""


@dataclass(frozen=True, slots=True, eq=False)
class InstanceReport:
    """What is known of one instance that may decode."""

    instance_id: str
    capacity_tokens: int
    """Tokens that its KV memory holds."""
    step_ms: float
    """Duration of a decode step; 0 if it has made none."""
    load: DecodeLoad | None
    """Its decoding requests as last reported; None if they never were."""
    heard_s: float | None
    """When that report came."""
    refusal: str = ""
    """Why nothing is placed there, such as that it drains; empty if something is. Nothing is moved there either."""
    is_ready: bool = True
    """Whether it is to report its requests: False while it starts or drains."""
    transfer_obstacle: str = ""
    """Why it cannot move KV; empty if it can."""
    costs: StepCosts | None = None
    """What its steps cost, by a profile; None: nobody knows."""
    stage: int | None = None
    """See `DecodeInstance`."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelReport:
    """What is known of one model."""

    instances: tuple[InstanceReport, ...]
    unreachable: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By frontend: instances that it has no stream to, so that none of its requests can be there. A frontend that is
    not named reaches all."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodeView:
    """What is known of one model's decoding."""

    model: str
    instances: tuple[DecodeInstance, ...]
    excluded: dict[str, str]
    """Instances whose requests cannot be seen or must not be moved, and why."""
    unheard: int
    """How many of them should have reported their requests and have not."""

    @property
    def requests(self) -> int:
        """How many decode on `instances`."""
        return sum(len(instance.load.request_ids) for instance in self.instances)

    @property
    def predicted_requests(self) -> int:
        """How many of these have a predicted remaining length."""
        return sum(instance.load.predicted_requests for instance in self.instances)


def decode_view(
    model: str,
    reports: Iterable[InstanceReport],
    parameters: ReschedulerParameters,
    shunned: frozenset[str],
    now_s: float,
) -> DecodeView:
    """Who takes part in this interval. `shunned` are targets that have refused of late; their own requests may still
    leave."""
    seen: list[tuple[InstanceReport, DecodeLoad]] = []
    excluded: dict[str, str] = {}
    unheard = 0
    for report in reports:
        if report.refusal:
            excluded[report.instance_id] = report.refusal
            unheard += report.is_ready
            continue
        load, heard_s = report.load, report.heard_s
        if load is None or heard_s is None or now_s - heard_s > MISSED_REPORTS * parameters.interval_s:
            age = "never" if heard_s is None else f"{now_s - heard_s:.1f} s ago"
            excluded[report.instance_id] = f"has told of its running requests {age}"
            unheard += 1
            continue
        if report.transfer_obstacle:
            excluded[report.instance_id] = f"cannot move requests: {report.transfer_obstacle}"
            continue
        seen.append((report, load))
    horizon = parameters.horizon.fitted(max((load.longest_tokens for _, load in seen), default=0))
    instances = tuple(
        DecodeInstance(
            report.instance_id,
            report.capacity_tokens,
            report.step_ms,
            report.instance_id not in shunned,
            load.over(horizon),
            report.costs,
            report.stage,
        )
        for report, load in seen
    )
    return DecodeView(model, instances, excluded, unheard)
