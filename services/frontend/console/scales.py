"""Models that are scaled: what their load needs, what they have, and what comes next. Pure."""

import json
import logging
from collections.abc import Iterator, Mapping

import msgspec

from controlplane.model.autoscale_record import AutoscalePolicy
from controlplane.planning.autoscale.status import AutoscaleStatus, known_fields, next_step
from penstock.v1 import autoscale_pb2
from services.frontend.console.collector import Look, Unanswered
from services.frontend.console.state import EventRow, ScaleRow

log = logging.getLogger(__name__)


def scale_rows(look: Look) -> tuple[ScaleRow, ...]:
    """By model; one that cannot be read is left out, and logged."""
    rows = []
    for told in () if isinstance(look.scaled, Unanswered) else look.scaled.models:
        try:
            rows.append(_row(told))
        except (ValueError, msgspec.ValidationError) as error:
            log.warning("what the planner says of a model cannot be read", extra={"model": told.model, "error": error})
    return tuple(rows)


def scale_events(at_unix_ms: int, before: Mapping[str, int], rows: tuple[ScaleRow, ...]) -> Iterator[EventRow]:
    """What was decided anew. `before`: replicas wanted at the look before, by model."""
    for row in rows:
        former = before.get(row.model)
        if row.decided and former is not None and former != row.wanted:
            is_scaled = "would be scaled" if row.dry_run else "is scaled"
            yield EventRow(at_unix_ms, f"{row.model} {is_scaled} from {former} to {row.wanted}: {row.why}")


def _row(told: autoscale_pb2.ScaledModel) -> ScaleRow:
    fields = json.loads(told.policy_json)
    policy = known_fields(AutoscalePolicy, fields)
    status = known_fields(AutoscaleStatus, json.loads(told.status_json)) if told.status_json else None
    row = ScaleRow(
        model=told.model,
        policy=fields,
        minimum=policy.minimum,
        maximum=policy.most,
        slo=_slo(policy),
        cost="" if status is None else _cost(policy, status),
        next=next_step(policy, status),
    )
    if status is None:
        return row
    return msgspec.structs.replace(
        row,
        decided=True,
        serving=status.serving,
        wanted=status.wanted,
        rate_per_s=round(status.rate_per_s, 3),
        expected_per_s=round(status.expected_per_s, 3),
        upper_per_s=round(status.upper_per_s, 3),
        predictor=status.predictor,
        forecast_error=round(status.forecast_error, 4),
        capacity_per_s=round(status.capacity_per_s, 3),
        waiting=status.waiting,
        kept_share=None if status.kept_share is None else round(status.kept_share, 4),
        why=status.why,
        refused=status.refused,
        dry_run=status.dry_run,
    )


def _slo(policy: AutoscalePolicy) -> str:
    limits = (("TTFT", policy.ttft_ms), ("TPOT", policy.tpot_ms), ("end to end", policy.e2e_ms))
    said = [f"{name} {limit:g} ms" for name, limit in limits if limit is not None]
    return f"{100 * policy.share:g} % of requests within {', '.join(said)}"


def _cost(policy: AutoscalePolicy, status: AutoscaleStatus) -> str:
    """Empty where nobody has said a price."""
    if not (policy.price_per_hour or policy.kinds):
        return ""
    cost = status.cost_per_hour if policy.kinds else status.wanted * policy.gpus * policy.price_per_hour
    bound = "" if policy.budget_per_hour == float("inf") else f" of {policy.budget_per_hour:g}"
    replicas = " + ".join(map(str, status.kinds)) or f"{status.wanted} replicas"
    return f"{cost:.6g}{bound} an hour for {replicas}"
