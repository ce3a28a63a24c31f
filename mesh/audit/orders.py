"""Orders to the mesh, as they are remembered: who, what, when, and what came of it. No prompts, no secrets."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

MAX_TEXT: Final = 300
"""Characters of each text of an order; longer ones are cut."""


class Order(msgspec.Struct, frozen=True):
    """One order that was given, refused ones too."""

    unix_ms: int
    """When it had its outcome."""
    who: str
    """The caller's identity, the name of an API key, or where a caller without either called from."""
    order: str
    """As the command is called by which people give it: drain, policy, ..."""
    to: str
    """ROLE/MEMBER of the process that took it."""
    parameters: Mapping[str, str] = {}
    outcome: str = "done"
    """done, or why not."""


@dataclass(frozen=True, slots=True)
class OrderMethod:
    """An RPC by which the mesh is ordered about."""

    order: str
    shown: tuple[str, ...] = ()
    """Fields of the request, and of messages in it by dots, that are remembered. Others may hold what is nobody's
    business: the prompts of a judge, addresses with passwords."""


_PACKAGE: Final = "/penstock.v1."
ORDER_METHODS: Final[Mapping[str, OrderMethod]] = {
    f"{_PACKAGE}{method}": order
    for method, order in {
        "Worker/Drain": OrderMethod("drain", ("migrate",)),
        "Worker/Migrate": OrderMethod("migrate", ("request_id", "target_instance_id", "stop_and_copy")),
        "Worker/LoadAdapter": OrderMethod("lora load", ("adapter.name",)),
        "Worker/UnloadAdapter": OrderMethod("lora unload", ("digest",)),
        "Member/Restart": OrderMethod("restart", ("incarnation_id", "drain_s")),
        "Scheduler/SetPolicy": OrderMethod("policy", ("policy", "parameters")),
        "Scheduler/SetRescheduler": OrderMethod("rescheduler", ("mode", "parameters")),
        "StagePlanner/PlanStages": OrderMethod("stages plan"),
        "StagePlanner/SetStages": OrderMethod(
            "stages", ("enabled", "method", "fewest_lengths", "replan_s", "refinement")
        ),
        "Planner/SetGoal": OrderMethod(
            "plan goal", ("goal.cascade", "goal.gpus", "goal.tiers", "goal.quality", "goal.latency_s", "goal.replan")
        ),
        "Planner/ApplyPlan": OrderMethod("plan apply"),
        "Planner/RemoveGoal": OrderMethod("plan remove", ("cascade",)),
        "Autoscaler/SetAutoscale": OrderMethod("autoscale set", ("policy_json",)),
        "Autoscaler/RemoveAutoscale": OrderMethod("autoscale remove", ("model",)),
        "Cascade/SetCascade": OrderMethod("cascade set", ("cascade.name", "cascade.tiers")),
        "Cascade/RemoveCascade": OrderMethod("cascade remove", ("name",)),
    }.items()
}
"""By a method's whole path. What the mesh orders itself by them (a rescheduler's migrations, adapters that frontends
pass on) is no order of a person and is left out, see `OrderRecorder`."""


def shown_parameters(method: OrderMethod, request: Message) -> dict[str, str]:
    """What is remembered of a request, each text cut to a bounded length."""
    fields = MessageToDict(request, preserving_proto_field_name=True)
    found: dict[str, str] = {}
    for path in method.shown:
        value: Any = fields
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            found[path.rpartition(".")[2]] = cut(value if isinstance(value, str) else json.dumps(value))
    return found


def cut(text: str) -> str:
    """At most MAX_TEXT characters of it."""
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."
