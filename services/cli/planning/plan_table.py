"""A cascade plan as a table."""

from rich.table import Table

from controlplane.planning.cascade.plan import CascadePlan, PlannedReplicas


def plan_table(plan: CascadePlan) -> Table:
    """A row for each tier; targets and what is expected in the title."""
    asked = (
        f"quality {plan.quality_target:g}" if plan.quality_target is not None else f"p95 {plan.latency_target_s:g} s"
    )
    used = sum(tier.gpus for tier in plan.tiers)
    table = Table(
        title=f"{plan.name}: {asked} asked at {plan.rate_per_s:g} requests/s on {plan.gpus} GPUs",
        caption=f"expected: quality {plan.quality:.1f}, p95 of the slowest tier {plan.latency_p95_s:.2f} s; "
        f"{plan.gpus - used} GPUs stay free",
    )
    for name in ("tier", "accepts from", "share", "GPUs", "replicas", "p95 (s)"):
        table.add_column(name, justify="left" if name in ("tier", "replicas") else "right")
    accepts = [*(f"{threshold:.1f}" if threshold <= 100 else "never" for threshold in plan.thresholds), "all"]
    for tier, threshold in zip(plan.tiers, accepts, strict=True):
        replicas = " + ".join(map(_replicas, tier.replicas)) or "-"
        table.add_row(
            tier.model,
            threshold,
            f"{tier.share:.1%}",
            str(tier.gpus),
            replicas,
            f"{tier.p95_s:.2f}" if tier.share else "-",
        )
    return table


def _replicas(replicas: PlannedReplicas) -> str:
    pipeline = f", PP={replicas.pp}" if replicas.pp > 1 else ""
    return f"{replicas.count} x (TP={replicas.tp}{pipeline})"
