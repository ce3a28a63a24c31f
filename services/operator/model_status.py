"""What a `PenstockModel` says of itself in its status (pure)."""

from collections.abc import Collection, Iterable
from typing import Any, Final

from controlplane.deployment.deployment_status import DeploymentStatus
from services.operator.model_resource import ModelResource
from services.operator.pod import Pod

READY: Final = "Ready"


def model_status(
    resource: ModelResource,
    pods: Collection[Pod],
    joined: Collection[str],
    deployment: DeploymentStatus,
    refused: str,
    now: str,
) -> dict[str, Any]:
    """The whole status. `pods`: of this resource; `joined`: member ids of the mesh's workers; `refused`: why the
    resource is not followed, or empty; `now`: in RFC 3339, for a condition that changes."""
    running = [pod for pod in pods if not pod.has_ended and not pod.is_leaving]
    is_ready, reason, message = _ready(resource, pods, deployment, refused)
    condition: dict[str, Any] = {
        "type": READY,
        "status": str(is_ready),
        "reason": reason,
        "message": message,
        "observedGeneration": resource.generation,
        "lastTransitionTime": now,
    }
    for former in resource.status.get("conditions") or ():
        if (former.get("type"), former.get("status")) == (READY, condition["status"]):
            condition["lastTransitionTime"] = former.get("lastTransitionTime", now)
    return {
        "observedGeneration": resource.generation,
        "replicas": len(running),
        "readyReplicas": sum(pod.instance in joined for pod in running),
        "selector": resource.selector,
        "conditions": [condition],
    }


def _ready(
    resource: ModelResource, pods: Iterable[Pod], deployment: DeploymentStatus, refused: str
) -> tuple[bool, str, str]:
    """Whether what is wanted serves, why in one word, and why in a sentence."""
    if resource.is_leaving:
        return False, "Draining", "its instances drain; it is gone when they are"
    if refused:
        return False, "Refused", refused
    missing = [each for each in deployment.missing if each.model == resource.model]
    leaving = {pod.instance for pod in pods} & set(deployment.leaving)
    if missing:
        troubles = [f"pod {pod.name}: {pod.reason}" for pod in pods if pod.reason]
        lacks = [f"lacks {each.count} (TP={each.tp}, PP={each.pp}): {each.why}" for each in missing]
        return False, "Missing", "; ".join((*lacks, *troubles))
    if leaving:
        return False, "Draining", f"drains {', '.join(sorted(leaving))}"
    return True, "AsWanted", "all instances serve"
