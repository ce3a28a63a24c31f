"""A cascade plan as a table."""

from rich.table import Table

from controlplane.model.cascade_record import MAX_SCORE
from controlplane.planning.cascade.latency import IN_WORDS
from controlplane.planning.cascade.plan import CascadePlan, PlannedReplicas, PlannedTier


def plan_table(plan: CascadePlan) -> Table:
    """A row for each tier; targets and what is expected in the title."""
    table = Table(
        title=f"{plan.name}: {_asked(plan)} at {plan.rate_per_s:g} requests/s on {plan.gpus} GPUs",
        caption=f"{_promised(plan)}expected: quality {plan.quality:.1f}, {_latencies(plan)}; {_left(plan)}",
    )
    for name in ("tier", "accepts from", "right there", "share", "GPUs", "replicas", "p95 (s)", "mean (s)"):
        table.add_column(name, justify="left" if name in ("tier", "replicas") else "right")
    for tier, threshold in zip(plan.tiers, (*plan.thresholds, 0.0), strict=True):
        replicas = " + ".join(map(_replicas, tier.replicas)) or "-"
        seconds = (_seconds(tier, latency_s) for latency_s in (tier.p95_s, tier.mean_s))
        right = _right_at(tier, threshold)
        table.add_row(
            tier.model, accepted_from(threshold), right, f"{tier.share:.1%}", str(tier.gpus), replicas, *seconds
        )
    return table


def accepted_from(threshold: float) -> str:
    """A threshold as a table cell: "skipped" for a tier that accepts nothing, "all" for 0."""
    if threshold > MAX_SCORE:
        return "skipped"
    return f"{threshold:.1f}" if threshold > 0 else "all"


def _right_at(tier: PlannedTier, threshold: float) -> str:
    """The chance that an answer at the threshold is right, and by how many labelled answers that is known."""
    if tier.calibration is None or not 0 < threshold <= MAX_SCORE:
        return "-"
    return f"{tier.calibration.at(threshold):.0%} ({tier.calibration.samples})"


def _promised(plan: CascadePlan) -> str:
    promise = plan.promise
    if promise is None:
        return ""
    by = f" by {promise.label}" if promise.label else ""
    return (
        f"promised: at least {promise.quality:g} with {promise.probability:g} % ({promise.tested:.1f} on "
        f"{promise.samples} requests apart, labelled{by}); "
    )


def _steady(plan: CascadePlan) -> str:
    runs = plan.steady
    if runs is None:
        return ""
    whole = f"p95 from end to end {runs.whole_p95_s:.2f} s"
    margin = f"within {runs.margin_percent:.0f} % in {runs.runs} steady runs of {runs.requests} requests"
    if runs.is_settled:
        return f", {whole}, all {margin}"
    if runs.is_overloaded:
        return f", {whole} and rising: NOT SETTLED {margin}: more requests come than the replicas serve"
    return f", {whole}, NOT SETTLED: {margin}: a tier is near what it sustains, or reached by few"


def _left(plan: CascadePlan) -> str:
    free = plan.gpus - plan.judge_gpus - sum(tier.gpus for tier in plan.tiers)
    judging = f"{plan.judge_gpus} GPUs judge {plan.judged_per_s:.2g} answers/s, " if plan.judge_gpus else ""
    return f"{judging}{free} GPUs stay free"


def _asked(plan: CascadePlan) -> str:
    if plan.quality_target is not None:
        return f"quality {plan.quality_target:g} at the least {IN_WORDS[plan.minimise]}"
    if plan.latency_target_s is not None:
        return f"{IN_WORDS[plan.minimise]} within {plan.latency_target_s:g} s"
    return "no target"


def _latencies(plan: CascadePlan) -> str:
    """Both, where the plan knows both."""
    known = [(IN_WORDS["slowest_tier"], plan.latency_p95_s), (IN_WORDS["end_to_end"], plan.latency_mean_s)]
    latencies = ", ".join(f"{words} {latency_s:.2f} s" for words, latency_s in known if latency_s is not None)
    return latencies + _steady(plan)


def _seconds(tier: PlannedTier, latency_s: float | None) -> str:
    return "-" if latency_s is None or not tier.share else f"{latency_s:.2f}"


def _replicas(replicas: PlannedReplicas) -> str:
    pipeline = f", PP={replicas.pp}" if replicas.pp > 1 else ""
    return f"{replicas.count} x (TP={replicas.tp}{pipeline})"
