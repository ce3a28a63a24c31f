"""Looks at meshes that tests make up."""

from collections.abc import Sequence
from typing import Any

from controlplane.deployment.deployment_status import DeploymentStatus
from mesh.leadership_state import LeaderRecord
from mesh.membership import Member
from penstock.v1 import (
    autoscale_pb2,
    cascade_pb2,
    frontend_pb2,
    monitor_pb2,
    planner_pb2,
    scheduler_pb2,
    stages_pb2,
    worker_pb2,
)
from services.frontend.console.collector import Look

START_UNIX_MS = 1_700_000_000_000


def worker(number: int, incarnation_id: str = "first", **attributes: str) -> Member:
    name = f"w{number:04}"
    return Member("worker", name, incarnation_id, f"{name}:1", "", {"model": "m", "engine": "simulated", **attributes})


def member(role: str, number: int = 0, incarnation_id: str = "first") -> Member:
    return Member(role, f"{role}-{number}", incarnation_id, f"{role}-{number}:1", "", {})


CONTROL = tuple(member(role) for role in ("frontend", "scheduler", "monitor", "cascade", "planner"))


def load(**fields: Any) -> worker_pb2.LoadReport:
    return worker_pb2.LoadReport(**{"state": worker_pb2.INSTANCE_STATE_READY, **fields})


def ended(number: int, **fields: Any) -> frontend_pb2.EndedRequest:
    """Answered: 100 ms to the first of 11 tokens, then 10 ms for each."""
    request = {
        "number": number,
        "request_id": f"r{number}",
        "model": "m",
        "status": 200,
        "instance_id": "w0000",
        "last_instance_id": "w0000",
        "policy": "penstock",
        "prompt_tokens": 100,
        "cached_tokens": 40,
        "generated_tokens": 11,
        "arrived_unix_ms": START_UNIX_MS - 500,
        "admitted_ms": 1.0,
        "placed_ms": 5.0,
        "first_token_ms": 100.0,
        "ended_ms": 200.0,
        "choices": 1,
    }
    return frontend_pb2.EndedRequest(**{**request, **fields})


def look(
    *,
    seconds: float = 0.0,
    workers: Sequence[Member] = (worker(0), worker(1)),
    control: Sequence[Member] = CONTROL,
    loads: Sequence[worker_pb2.LoadReport] | None = None,
    states: Sequence[str] | None = None,
    requests: Sequence[frontend_pb2.EndedRequest] = (),
    **fields: Any,
) -> Look:
    """A mesh that is well, `seconds` behind the start; `fields` take the place of what is made up."""
    loads = [load() for _ in workers] if loads is None else loads
    states = ["ready" for _ in workers] if states is None else states
    snapshot = scheduler_pb2.GetSnapshotResponse(policy="penstock", synced=True)
    cluster = monitor_pb2.GetClusterResponse()
    for each, report, state in zip(workers, loads, states, strict=True):
        name, model = each.member_id, each.attributes["model"]
        snapshot.instances.add(instance_id=name, model=model, state=state, load=report, cached_blocks=7, phase="any")
        cluster.instances.add(load=report, load_age_ms=20).instance.CopyFrom(
            worker_pb2.InstanceDescription(
                instance_id=name, incarnation_id=each.incarnation_id, model=model, kv_blocks=100, block_tokens=16
            )
        )
    policy = scheduler_pb2.GetPolicyResponse(policy="penstock", available=["lmetric", "penstock"])
    rescheduler = scheduler_pb2.GetReschedulerResponse(mode="off", available=["off", "current"], in_charge=True)
    last = max((each.number for each in requests), default=0)
    schedulers = [each.member_id for each in control if each.role == "scheduler"]
    frontends = [each.member_id for each in control if each.role == "frontend"]
    made_up: dict[str, Any] = {
        "at_unix_ms": START_UNIX_MS + int(1000 * seconds),
        "members": (*control, *workers),
        "missing_members": 0,
        "leaders": {"pools": LeaderRecord("pools", "scheduler-0", "first", 1)},
        "unwell": {},
        "snapshot": snapshot,
        "cluster": cluster,
        "policies": dict.fromkeys(schedulers, policy),
        "reschedulers": dict.fromkeys(schedulers, rescheduler),
        "placements": dict.fromkeys(schedulers, scheduler_pb2.ListPlacementsResponse()),
        "frontends": dict.fromkeys(frontends, frontend_pb2.GetFrontendStatusResponse(http_address="h:1")),
        "running": dict.fromkeys(frontends, frontend_pb2.ListFrontendRequestsResponse()),
        "ended": dict.fromkeys(frontends, frontend_pb2.ListEndedResponse(requests=requests, last=last)),
        "cascades": cascade_pb2.ListCascadesResponse(),
        "plans": planner_pb2.ListPlansResponse(),
        "stages": stages_pb2.GetStagesResponse(),
        "scaled": autoscale_pb2.ListScaledResponse(),
        "deployments": list[DeploymentStatus](),
    }
    return Look(**{**made_up, **fields})
