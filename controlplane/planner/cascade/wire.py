"""Goals and plans between Python and protobuf."""

from typing import get_args

from controlplane.model.cascade_goal import PROBABILITY, CascadeGoal, Minimise
from controlplane.planner.cascade.manager import CascadeStatus
from controlplane.planning.cascade.quality_watch import AchievedQuality, PromiseState
from mesh.errors import ConfigurationError
from penstock.v1 import planner_pb2


def goal_from(message: planner_pb2.CascadeGoal) -> CascadeGoal:
    """Raises `ConfigurationError` for one that no plan can be made for."""
    return CascadeGoal(
        cascade=message.cascade,
        gpus=message.gpus,
        tiers=tuple(message.tiers),
        quality=message.quality if message.HasField("quality") else None,
        latency_s=message.latency_s if message.HasField("latency_s") else None,
        judge_s=message.judge_s if message.HasField("judge_s") else None,
        replan=message.replan,
        minimise=_minimise(message.minimise),
        probability=message.probability if message.HasField("probability") else PROBABILITY,
        judge_gpu_s=message.judge_gpu_s,
    ).checked()


def _minimise(word: str) -> Minimise:
    """Empty from clients that know of one only."""
    if word in ("", "slowest_tier"):
        return "slowest_tier"
    if word == "end_to_end":
        return "end_to_end"
    raise ConfigurationError(f"a goal minimises {' or '.join(get_args(Minimise))}, not {word!r}")


def message_from(goal: CascadeGoal) -> planner_pb2.CascadeGoal:
    """The same as a message."""
    return planner_pb2.CascadeGoal(
        cascade=goal.cascade,
        gpus=goal.gpus,
        tiers=goal.tiers,
        quality=goal.quality,
        latency_s=goal.latency_s,
        judge_s=goal.judge_s,
        replan=goal.replan,
        minimise=goal.minimise,
        probability=goal.probability,
        judge_gpu_s=goal.judge_gpu_s,
    )


def status_message(status: CascadeStatus) -> planner_pb2.CascadePlanStatus:
    """One cascade's goal, plan and verdict, as operators are shown it."""
    return planner_pb2.CascadePlanStatus(
        cascade=status.cascade,
        goal=message_from(status.goal) if status.goal is not None else None,
        revision=status.revision,
        plan_json=status.plan_json,
        verdict=status.verdict,
        workloads_total=status.workloads,
        plans_total=status.plans,
        quality=None if status.quality is None else _quality_message(status.quality),
    )


def _quality_message(quality: AchievedQuality) -> planner_pb2.AchievedQuality:
    return planner_pb2.AchievedQuality(
        promised=quality.promised,
        probability=quality.probability,
        achieved=quality.achieved,
        labelled=quality.labelled,
        state=quality.state,
    )


def quality_from(message: planner_pb2.AchievedQuality) -> AchievedQuality:
    """The same from a message."""
    return AchievedQuality(
        promised=message.promised,
        probability=message.probability,
        achieved=message.achieved if message.HasField("achieved") else None,
        labelled=message.labelled,
        state=PromiseState(message.state),
    )
