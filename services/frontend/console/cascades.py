"""Cascades: what their plans promise beside what came of it. Pure."""

from collections.abc import Iterator, Mapping, Sequence

from controlplane.planning.cascade.plan import CascadePlan
from controlplane.planning.cascade.quality_watch import AchievedQuality, PromiseState
from penstock.v1 import cascade_pb2, frontend_pb2, planner_pb2
from services.frontend.console.collector import Look, Unanswered
from services.frontend.console.state import CascadeRow, TierRow
from services.frontend.console.window import percentiles

Ended = frontend_pb2.EndedRequest


def cascade_rows(look: Look, plans: Mapping[str, CascadePlan], ended: Sequence[Ended]) -> tuple[CascadeRow, ...]:
    """`ended`: all requests of the window."""
    if isinstance(look.cascades, Unanswered):
        return ()
    return tuple(
        _row(each, plans.get(each.name) if each.plan_revision else None, _answers(each.name, ended))
        for each in look.cascades.cascades
    )


def promised(status: planner_pb2.CascadePlanStatus) -> AchievedQuality | None:
    """What labelled answers are worth beside what the plan promises; None where it promises nothing, or where the
    planner is of another release and says of it what is not known here."""
    if not status.HasField("quality") or status.quality.state not in set(PromiseState):
        return None
    quality = status.quality
    achieved = quality.achieved if quality.HasField("achieved") else None
    state = PromiseState(quality.state)
    return AchievedQuality(quality.promised, quality.probability, achieved, quality.labelled, state)


def _answers(name: str, ended: Sequence[Ended]) -> list[Ended]:
    return [request for request in ended if request.model == name and request.tier]


def _row(cascade: cascade_pb2.CascadeDescription, plan: CascadePlan | None, answers: list[Ended]) -> CascadeRow:
    scores = [score for answer in answers if (score := _accepted_score(answer)) is not None]
    p95_ms = percentiles([answer.ended_ms for answer in answers]).p95
    return CascadeRow(
        name=cascade.name,
        tiers=tuple(_tiers(cascade, plan, answers)),
        judges=tuple(cascade.judges),
        thresholds_from=f"plan {cascade.plan_revision}" if cascade.plan_revision else "an operator",
        promised_quality=None if plan is None else round(plan.quality, 2),
        achieved_quality=_mean(scores),
        judged=len(scores),
        answered=len(answers),
        promised_p95_s=None if plan is None else round(plan.latency_p95_s, 3),
        achieved_p95_s=None if p95_ms is None else round(p95_ms / 1000, 3),
    )


def _tiers(
    cascade: cascade_pb2.CascadeDescription, plan: CascadePlan | None, answers: list[Ended]
) -> Iterator[TierRow]:
    for number, model in enumerate(cascade.tiers):
        planned = None
        if plan is not None:
            planned = next((tier for tier in plan.tiers if tier.model == model), None)
        asked = [tier for answer in answers for tier in answer.tiers if tier.model == model]
        reached = sum(any(tier.model == model for tier in answer.tiers) for answer in answers)
        seconds = percentiles([tier.seconds for tier in asked if tier.HasField("seconds")]).p95
        yield TierRow(
            model=model,
            threshold=cascade.thresholds[number] if number < len(cascade.thresholds) else None,
            planned_share=None if planned is None else round(planned.share, 4),
            share=round(reached / len(answers), 4) if answers else None,
            answers=sum(answer.tier == model for answer in answers),
            mean_score=_mean([tier.score for tier in asked if tier.HasField("score")]),
            planned_p95_s=None if planned is None else round(planned.p95_s, 3),
            p95_s=seconds,
        )


def _accepted_score(answer: Ended) -> float | None:
    """Of the tier's last answer: one that was asked again has another before it."""
    for tier in reversed(answer.tiers):
        if tier.model == answer.tier:
            return tier.score if tier.HasField("score") else None
    return None


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 2) if values else None
