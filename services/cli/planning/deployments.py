"""How far supervisors have come with the instances that plans want, and why something is missing."""

import logging
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from controlplane.deployment.deployment_status import DEPLOYMENTS_PREFIX, DeploymentStatus
from mesh.store.interface import StateStore

log = logging.getLogger(__name__)


async def read_deployments(store: StateStore) -> list[DeploymentStatus]:
    """Of all supervisors that follow a plan now. Raises `StoreError`."""
    found: list[DeploymentStatus] = []
    for entry in (await store.range(DEPLOYMENTS_PREFIX)).entries:
        try:
            record = msgspec.json.decode(entry.value, type=DeploymentStatus)
        except msgspec.MsgspecError as error:
            log.warning("a deployment record cannot be read", extra={"key": entry.key, "error": str(error)})
            continue
        if record.plans or record.waiting:
            found.append(record)
    return found


def deployment_status(record: DeploymentStatus) -> dict[str, Any]:
    """For `--json`: what runs against all plans that the supervisor follows."""
    absent: dict[str, Any] = {"missing": [], "leaving": [], "gpu_kind": "", "waiting": {}}
    return {**absent, **msgspec.to_builtins(record), "is_reached": record.is_reached}


def deployments_of(
    cascade: str, models: Collection[str], revision: int, records: Sequence[DeploymentStatus]
) -> list[dict[str, Any]]:
    """The same of this cascade's plan and its models alone; `is_reached` only once this `revision` is."""
    found: list[dict[str, Any]] = []
    for record in records:
        if cascade in record.plans:
            followed = record.plans[cascade]
            of_models = msgspec.structs.replace(
                record,
                plans={cascade: followed},
                missing=tuple(each for each in record.missing if each.model in models),
                leaving=tuple(name for name in record.leaving if name.rpartition("-")[0] in models),  # MODEL-NUMBER
                waiting={name: why for name, why in record.waiting.items() if name.rpartition("-")[0] in models},
            )
            status = deployment_status(of_models)
            found.append({**status, "is_reached": of_models.is_reached and followed in (0, revision)})
    return found


def deployment_lines(deployments: Sequence[dict[str, Any]]) -> list[str]:
    """Deployments as lines of text: whether each supervisor runs the instances of the plan."""
    if not deployments:
        return ["nobody here starts and drains its instances: see penstock plan export"]
    return [line for deployment in deployments for line in lines_of_deployment(deployment)]


def lines_of_deployment(deployment: dict[str, Any]) -> list[str]:
    """The same of one supervisor: what it lacks and why, and what is not planned and still runs."""
    where = f"instances of penstock up {deployment['supervisor']}"
    if deployment["is_reached"]:
        return [f"{where}: as planned"]
    lines = [f"{where}: NOT as planned" if deployment["plans"] else f"{where}: NOT all run"]
    for missing in deployment["missing"]:
        pipeline = f", PP={missing['pp']}" if missing["pp"] > 1 else ""
        lines.append(f"  lacks {missing['count']} {missing['model']} (TP={missing['tp']}{pipeline}): {missing['why']}")
    if deployment["leaving"]:
        lines.append(f"  not planned and not yet gone: {', '.join(deployment['leaving'])}")
    return lines + [f"  {name} waits: {why}" for name, why in sorted(deployment["waiting"].items())]
