"""Plans for some of a cascade's tiers, written for all of them."""

import pytest

from controlplane.planning.cascade.plan import CascadePlan, PlannedReplicas, PlannedTier, with_excluded_tiers
from controlplane.planning.cascade.routing import ESCALATE_ALL

MODELS = ("small", "medium", "large")


def plan_for(*models: str, thresholds: tuple[float, ...]) -> CascadePlan:
    tiers = tuple(PlannedTier(model, 1, (PlannedReplicas(1),), 1.0, 1.0, 0.5) for model in models)
    return CascadePlan("all", tiers, thresholds, 80.0, 1.0, 2.0, 4, latency_mean_s=1.0)


@pytest.mark.parametrize(
    ("models", "thresholds", "for_all"),
    [
        (MODELS, (60.0, 70.0), (60.0, 70.0)),
        (("small", "large"), (60.0,), (60.0, ESCALATE_ALL)),
        (("medium", "large"), (60.0,), (ESCALATE_ALL, 60.0)),
        (("small", "medium"), (60.0,), (60.0, 0.0)),
        (("small",), (), (0.0, ESCALATE_ALL)),
        (("large",), (), (ESCALATE_ALL, ESCALATE_ALL)),
    ],
)
def test_who_is_left_out_is_skipped_and_nobody_waits_for_it(
    models: tuple[str, ...], thresholds: tuple[float, ...], for_all: tuple[float, ...]
) -> None:
    plan = with_excluded_tiers(plan_for(*models, thresholds=thresholds), MODELS)
    assert [tier.model for tier in plan.tiers] == list(MODELS)
    assert [tier.replica_count for tier in plan.tiers] == [int(model in models) for model in MODELS]
    assert plan.thresholds == for_all
    assert (plan.quality, plan.latency_p95_s) == (80.0, 1.0)
