"""What people and scripts are told of the instances that plans want."""

import msgspec
import pytest

from controlplane.deployment.deployment_status import DEPLOYMENTS_PREFIX, DeploymentStatus, MissingReplicas
from controlplane.planning.cascade.plan import CascadePlan, PlannedReplicas, PlannedTier
from mesh.store.embedded import EmbeddedStore
from services.cli.planning.deployments import (
    deployment_lines,
    deployment_status,
    deployments_of,
    read_deployments,
)
from services.cli.planning.plan_table import plan_table

SHORT = DeploymentStatus(
    "here",
    {"both": 7, "other": 4},
    (MissingReplicas("large", 2, 2, 3, "it waits for 6 GPUs"), MissingReplicas("code", 1, 1, 1, "starting")),
    ("large-0", "code-model-1"),
)
BOTH = ("small", "large")


async def test_records_of_supervisors_with_plans_are_read_and_broken_ones_left_out(store: EmbeddedStore) -> None:
    await store.put(SHORT.key, msgspec.json.encode(SHORT))
    await store.put(DEPLOYMENTS_PREFIX + "idle", msgspec.json.encode(DeploymentStatus("idle", {})))
    await store.put(DEPLOYMENTS_PREFIX + "broken", b"{}")
    assert await read_deployments(store) == [SHORT]


def test_a_cascade_is_told_of_its_own_models_alone() -> None:
    (told,) = deployments_of("both", BOTH, 7, [SHORT])
    assert [missing["model"] for missing in told["missing"]] == ["large"]
    assert told["leaving"] == ("large-0",)
    assert told["plans"] == {"both": 7}
    assert not told["is_reached"]
    assert deployments_of("third", BOTH, 7, [SHORT]) == []


@pytest.mark.parametrize(("followed", "is_reached"), [(7, True), (6, False), (0, True)])
def test_only_the_revision_in_force_can_be_reached(followed: int, is_reached: bool) -> None:
    """0: an operator has set thresholds of his own since, the instances stay planned."""
    (told,) = deployments_of("both", BOTH, 7, [DeploymentStatus("here", {"both": followed})])
    assert told["is_reached"] is is_reached


def test_people_read_what_is_missing_and_why() -> None:
    assert deployment_lines([deployment_status(SHORT)]) == [
        "instances of penstock up here: NOT as planned",
        "  lacks 2 large (TP=2, PP=3): it waits for 6 GPUs",
        "  lacks 1 code (TP=1): starting",
        "  not planned and not yet gone: large-0, code-model-1",
    ]
    assert deployment_lines([deployment_status(DeploymentStatus("here", {"both": 7}))]) == [
        "instances of penstock up here: as planned"
    ]
    assert "penstock plan export" in deployment_lines([])[0]


def test_a_plan_without_a_target_is_shown_too() -> None:
    plan = CascadePlan("both", (PlannedTier("m", 1, (PlannedReplicas(1),), 1.0, 1.0),), (), 1.0, 1.0, 2.0, 1)
    assert plan_table(plan).title == "both: no target at 2 requests/s on 1 GPUs"
