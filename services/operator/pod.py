"""A pod of the operator's as the API server shows it (pure)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from controlplane.deployment.replicas import Shape
from mesh.exit_status import ExitStatus
from services.cli.supervisor.launcher import exit_reason
from services.operator.model_resource import INSTANCE_ANNOTATION, OWNER_LABEL, SHAPE_ANNOTATION, WORKER

ENDED: Final = ("Succeeded", "Failed")
"""Phases of pods none of whose containers runs or ever will."""


@dataclass(frozen=True, slots=True)
class Pod:
    """One instance, as far as the cluster has come with it."""

    name: str
    uid: str
    version: str
    resource: str
    """Name of its PenstockModel."""
    instance: str
    """Member id of its worker."""
    shape: Shape
    is_leaving: bool
    """Whether it has been told to end."""
    exit_status: int | None = None
    """Of its worker; None while the pod runs or is about to."""
    reason: str = ""
    """Why it ended, or what keeps it from starting; empty: nothing is known."""

    @classmethod
    def read(cls, shown: Mapping[str, Any]) -> "Pod | None":
        """None for one that is not the operator's."""
        metadata, status = shown["metadata"], shown.get("status") or {}
        annotations, labels = metadata.get("annotations") or {}, metadata.get("labels") or {}
        tp, _, pp = str(annotations.get(SHAPE_ANNOTATION, "")).partition("x")
        if (
            OWNER_LABEL not in labels
            or INSTANCE_ANNOTATION not in annotations
            or not (tp.isdecimal() and pp.isdecimal())
        ):
            return None
        ended = status.get("phase") in ENDED
        container = _worker_status(status)
        return cls(
            name=str(metadata["name"]),
            uid=str(metadata["uid"]),
            version=str(metadata["resourceVersion"]),
            resource=str(labels[OWNER_LABEL]),
            instance=str(annotations[INSTANCE_ANNOTATION]),
            shape=(int(tp), int(pp)),
            is_leaving=bool(metadata.get("deletionTimestamp")),
            exit_status=_exit_status(container) if ended else None,
            reason=_why_ended(status, container) if ended else _trouble(status, container),
        )

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it runs or will."""
        return self.exit_status is not None


def _worker_status(status: Mapping[str, Any]) -> Mapping[str, Any]:
    containers: list[Mapping[str, Any]] = status.get("containerStatuses") or []
    return next((each for each in containers if each.get("name") == WORKER), containers[0] if containers else {})


def _exit_status(container: Mapping[str, Any]) -> int:
    """An evicted pod may have no containers to tell of."""
    terminated = (container.get("state") or {}).get("terminated") or {}
    return int(terminated.get("exitCode", ExitStatus.FAILED))


def _why_ended(status: Mapping[str, Any], container: Mapping[str, Any]) -> str:
    terminated = (container.get("state") or {}).get("terminated") or {}
    said = exit_reason(str(terminated.get("message", "")))
    known = (said, status.get("message"), terminated.get("reason"), status.get("reason"))
    return str(next((each for each in known if each), ""))


def _trouble(status: Mapping[str, Any], container: Mapping[str, Any]) -> str:
    waiting = (container.get("state") or {}).get("waiting") or {}
    if waiting.get("message"):
        return f"{waiting.get('reason', 'it waits')}: {waiting['message']}"
    unscheduled = (
        each for each in status.get("conditions") or () if (each["type"], each["status"]) == ("PodScheduled", "False")
    )
    return "".join(f"{each.get('reason', '')}: {each.get('message', '')}" for each in unscheduled)
