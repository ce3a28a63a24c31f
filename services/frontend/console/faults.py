"""What is not as it should be, the worst first, each with what to do about it. Pure."""

from collections.abc import Container, Iterator, Mapping
from itertools import groupby
from typing import Final

from controlplane.planning.cascade.quality_watch import PromiseState
from penstock.v1 import frontend_pb2
from services.frontend.console.cascades import promised
from services.frontend.console.collector import Look, Unanswered
from services.frontend.console.state import Fault, InstanceRow, ScaleRow, Severity

SHOWN_NAMES: Final = 5
_RANK: Final = {severity: rank for rank, severity in enumerate(Severity)}
_STATES: Final[Mapping[str, tuple[Severity, str, str]]] = {
    "stale": (Severity.ERROR, "says nothing of its load: it hangs, or is cut off", "penstock restart {}"),
    "unmonitored": (Severity.WARNING, "is placed on by its last known load", "look whether its monitor is well"),
    "not in the snapshot": (
        Severity.WARNING,
        "has joined, and no scheduler places on it yet",
        "wait, or read its log: a model takes its time to load",
    ),
    "starting": (Severity.NOTE, "is starting", ""),
    "draining": (Severity.NOTE, "is draining", ""),
}


def faults(look: Look, instances: tuple[InstanceRow, ...], scales: tuple[ScaleRow, ...]) -> tuple[Fault, ...]:
    """All of them."""
    found = [
        *_of_processes(look),
        *_of_placement(look),
        *_of_frontends(look, instances),
        *_of_instances(instances),
        *_of_rescheduling(look),
        *_of_promises(look),
        *_of_deployments(look),
        *_of_scales(scales),
    ]
    return tuple(sorted(dict.fromkeys(found), key=lambda fault: _RANK[fault.severity]))


def _of_processes(look: Look) -> Iterator[Fault]:
    roles = {member.role for member in look.members}
    for role, severity, without in (
        ("scheduler", Severity.ERROR, "frontends place requests by frontend_round_robin"),
        ("monitor", Severity.ERROR, "schedulers go on by what they knew last"),
        ("worker", Severity.ERROR, "no request can be served"),
    ):
        if role not in roles:
            yield Fault(severity, f"no {role} is in the mesh: {without}", f"penstock serve {role}, or penstock up")
    for name, why in sorted(look.unwell.items()):
        yield Fault(Severity.ERROR, f"{name.replace('/', ' ')}: {why}", f"penstock restart {name.partition('/')[2]}")
    for answers in (look.policies, look.frontends):
        for member_id, answer in sorted(answers.items()):
            if isinstance(answer, Unanswered):
                yield Fault(Severity.ERROR, answer.why, f"penstock restart {member_id}")
    if isinstance(look.leaders, Unanswered):
        advice = "serving goes on; bring the state store back before anything else is restarted"
        yield Fault(Severity.ERROR, f"the state store: {look.leaders.why}", advice)
    if look.missing_members:
        what = f"the records of {look.missing_members} members are gone from the state store"
        yield Fault(Severity.WARNING, what, "they announce themselves again within seconds if they live")


def _of_placement(look: Look) -> Iterator[Fault]:
    for name, policy in sorted(look.policies.items()):
        if isinstance(policy, Unanswered):
            continue
        if policy.fallback and not policy.is_standby:
            what = f"scheduler {name} places by {policy.fallback} instead of {policy.policy}: {policy.fallback_reason}"
            yield Fault(Severity.ERROR, what, "penstock status says which process is missing")
        for unusable in policy.unusable:
            yield Fault(Severity.WARNING, f"a policy cannot be used: {unusable}", "penstock plugins")
    if not isinstance(look.snapshot, Unanswered) and not look.snapshot.synced:
        what = "the scheduler has not heard everything from a monitor yet"
        yield Fault(Severity.WARNING, what, "look whether the monitor is well")


def _of_frontends(look: Look, instances: tuple[InstanceRow, ...]) -> Iterator[Fault]:
    in_transit = {row.instance_id for row in instances if row.state in ("starting", "not in the snapshot", "draining")}
    for name, status in sorted(look.frontends.items()):
        if isinstance(status, Unanswered):
            continue
        if status.placement_fallback:
            what = f"frontend {name} places by {status.placement_fallback}: no scheduler answers it"
            yield Fault(Severity.ERROR, what, "look whether the schedulers are well")
        if status.waiting_requests:
            what = f"{status.waiting_requests} requests wait at frontend {name} for an instance"
            yield Fault(Severity.ERROR, what, "add instances, or look why theirs are not ready")
        if status.parser_process not in ("", "running"):
            what = f"the parser process of frontend {name} is {status.parser_process}"
            yield Fault(Severity.WARNING, what, "see the frontend's log")
        yield from _of_connections(name, status, in_transit)


def _of_connections(
    name: str, status: frontend_pb2.GetFrontendStatusResponse, in_transit: Container[str]
) -> Iterator[Fault]:
    """But to those that begin or end, of which that is said."""
    apart = [each.instance_id for each in status.workers if not each.connected and each.instance_id not in in_transit]
    if apart:
        what = f"frontend {name} is not connected to {_names(apart)}"
        yield Fault(Severity.WARNING, what, "look at the network between them, and at the workers' logs")
    open_breakers = [each.member_id for each in status.schedulers if each.breaker != "closed" or not each.connected]
    if open_breakers and len(open_breakers) < len(status.schedulers):
        what = f"frontend {name} does not ask {_names(open_breakers)}: a placement was missed"
        yield Fault(Severity.WARNING, what, "it is probed until it answers")


def _of_instances(instances: tuple[InstanceRow, ...]) -> Iterator[Fault]:
    unwell = sorted((row for row in instances if row.state in _STATES), key=lambda row: row.state)
    for state, rows in groupby(unwell, key=lambda row: row.state):
        severity, what, advice = _STATES[state]
        names = [row.instance_id for row in rows]
        yield Fault(severity, f"{_names(names)} {what}", advice.format(names[0]))
    stuck = sorted((row for row in instances if row.obstacle), key=lambda row: row.obstacle)
    for obstacle, rows in groupby(stuck, key=lambda row: row.obstacle):
        names = [row.instance_id for row in rows]
        what = f"no request can be moved to or from {_names(names)}: {obstacle}"
        yield Fault(Severity.WARNING, what, f"penstock restart {names[0]}")


def _of_rescheduling(look: Look) -> Iterator[Fault]:
    for name, each in sorted(look.reschedulers.items()):
        if not isinstance(each, Unanswered) and each.in_charge and each.fallback:
            what = f"scheduler {name} reschedules by {each.fallback} instead of {each.mode}: {each.fallback_reason}"
            yield Fault(Severity.WARNING, what, "penstock predictor, or a mode that needs none")


def _of_promises(look: Look) -> Iterator[Fault]:
    for status in () if isinstance(look.plans, Unanswered) else look.plans.plans:
        quality = promised(status)
        if quality is not None and quality.state is PromiseState.BROKEN:
            what = f"the plan of {status.cascade} does not hold its quality: {quality.says()}"
            yield Fault(Severity.ERROR, what, "penstock plan show")


def _of_deployments(look: Look) -> Iterator[Fault]:
    if isinstance(look.deployments, Unanswered):
        return
    for deployment in look.deployments:
        for missing in deployment.missing if deployment.plans else ():
            what = f"{missing.count} planned instances of {missing.model} do not run: {missing.why}"
            yield Fault(Severity.WARNING, what, "penstock plan show")
        for name, why in sorted(deployment.waiting.items()):
            yield Fault(Severity.WARNING, f"{name} has no place to run at: {why}", "penstock status")
        if deployment.plans and deployment.leaving:
            yield Fault(Severity.NOTE, f"not planned and not yet gone: {_names(list(deployment.leaving))}")


def _of_scales(scales: tuple[ScaleRow, ...]) -> Iterator[Fault]:
    for row in scales:
        if row.refused:
            what = f"{row.model} has {row.serving} of {row.wanted} replicas: {row.refused}"
            yield Fault(Severity.WARNING, what, "penstock autoscale show")


def _names(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more
