"""What plans promise of quality, beside what is achieved, as `penstock status` and `penstock plan show` tell it."""

from typing import Any

from controlplane.model.duties import CASCADES
from controlplane.planner.cascade.wire import quality_from
from controlplane.planning.cascade.quality_watch import PromiseState
from mesh.errors import RpcError
from mesh.membership import Directory
from mesh.store.interface import StateStore
from penstock.v1 import planner_pb2, planner_pb2_grpc
from services.cli.connection import answering_member, call
from services.cli.proto_json import plain


async def gather_promises(directory: Directory, store: StateStore) -> list[dict[str, Any]]:
    """{"cascade", "promised", "probability", "achieved", "labelled", "state", "says"} of each cascade whose plan
    promises a quality; empty where no planner runs."""
    if not directory.members("planner"):
        return []
    try:
        planner = await answering_member(directory, store, "planner", CASCADES)
        reply = await call(planner, planner_pb2_grpc.PlannerStub, "ListPlans", planner_pb2.ListPlansRequest())
    except RpcError as error:
        return [
            {"cascade": "", "state": PromiseState.UNKNOWN.value, "says": f"what plans promise is not known: {error}"}
        ]
    return [
        {"cascade": status.cascade, **plain(status.quality), "says": quality_from(status.quality).says()}
        for status in reply.plans
        if status.HasField("quality")
    ]


def promise_line(promise: dict[str, Any]) -> str:
    """One promise in words."""
    return f"quality of {promise['cascade']}: {promise['says']}" if promise["cascade"] else str(promise["says"])


def is_broken(promise: dict[str, Any]) -> bool:
    """Whether it is bad news."""
    return bool(promise["state"] == PromiseState.BROKEN)
