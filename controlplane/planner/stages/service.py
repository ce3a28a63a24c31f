"""The planner's gRPC methods about stages."""

from typing import Any

import grpc
import msgspec

from controlplane.planner.stages.manager import StagePlanManager
from controlplane.policies.stages.layout import StageLayout
from controlplane.policies.stages.record import BoundaryRecord, StageRecord, StagesSetting
from mesh.errors import ConfigurationError, PenstockError
from penstock.v1 import stages_pb2, stages_pb2_grpc


class StagePlannerService(stages_pb2_grpc.StagePlannerServicer):
    """Serves `penstock.v1.StagePlanner`: shows the stages, switches them on and off, plans on demand."""

    def __init__(self, manager: StagePlanManager) -> None:
        self._manager = manager

    async def GetStages(self, request: stages_pb2.GetStagesRequest, context: Any) -> stages_pb2.GetStagesResponse:
        """Plans, boundaries and how they moved."""
        return self._status()

    async def PlanStages(self, request: stages_pb2.PlanStagesRequest, context: Any) -> stages_pb2.GetStagesResponse:
        """Plan now; what stands in the way is part of the answer."""
        if not self._manager.setting.enabled:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, "stages are switched off; `penstock stages on` switches them on"
            )
        if not self._manager.is_leading:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another planner makes the plans; ask the leader")
        try:
            await self._manager.plan_now()
        except PenstockError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        return self._status()

    async def SetStages(self, request: stages_pb2.SetStagesRequest, context: Any) -> stages_pb2.GetStagesResponse:
        """On or off, and how."""
        try:
            await self._manager.set(_setting(self._manager.setting, request))
        except ConfigurationError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except PenstockError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        return self._status()

    def _status(self) -> stages_pb2.GetStagesResponse:
        manager = self._manager
        models = []
        for model, members in manager.workers().items():
            alive = {member.member_id for member in members}
            models.append(_model(manager, model, manager.record(model), alive))
        return stages_pb2.GetStagesResponse(
            enabled=manager.setting.enabled,
            models=models,
            method=manager.setting.method.value,
            refinement=manager.setting.parameters.refinement.policy.value,
        )


def _setting(before: StagesSetting, request: stages_pb2.SetStagesRequest) -> StagesSetting:
    """Raises `ConfigurationError` for what is not known or out of bounds."""
    given: dict[str, Any] = {"enabled": request.enabled}
    if request.method:
        given["method"] = request.method
    if request.fewest_lengths:
        given["fewest_lengths"] = request.fewest_lengths
    if request.replan_s:
        given["replan_s"] = request.replan_s
    known: dict[str, Any] = msgspec.to_builtins(before)
    if request.refinement:
        known["parameters"]["refinement"]["policy"] = request.refinement
    try:
        return msgspec.convert({**known, **given}, StagesSetting)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"stages cannot be set so: {error}") from None


def _model(
    manager: StagePlanManager, model: str, record: StageRecord | None, alive: set[str]
) -> stages_pb2.ModelStages:
    message = stages_pb2.ModelStages(model=model, obstacle=manager.obstacles.get(model, ""))
    if record is None:
        return message
    boundaries = manager.boundaries(record)
    message.revision = record.layout.revision
    message.planned_unix_ms = record.planned_unix_ms
    message.quality = record.quality
    message.profile = record.profile
    message.lengths = record.lengths
    message.in_flight = record.in_flight
    message.stages.extend(_stages(record.layout, boundaries, alive))
    members = set(record.layout.instance_ids)
    message.boundary_moves.extend(_move(move) for move in manager.moves if move.instance_id in members)
    return message


def _stages(layout: StageLayout, boundaries: dict[str, float], alive: set[str]) -> list[stages_pb2.Stage]:
    """As planned, with the ranges that are in force now; a stage without anybody alive has none."""
    serving = layout.covering(alive)
    refined = None if serving is None else serving.refined(boundaries)
    stages = []
    for number, instance_ids in enumerate(layout.stages):
        first, last = _range(refined, instance_ids)
        planned = layout.boundaries_tokens[number] if number < len(layout.boundaries_tokens) else 0
        stages.append(
            stages_pb2.Stage(
                first_tokens=first,
                last_tokens=last,
                planned_last_tokens=planned,
                instances=[
                    stages_pb2.StageInstance(
                        instance_id=each, alive=each in alive, boundary_tokens=boundaries.get(each, 0.0)
                    )
                    for each in instance_ids
                ],
            )
        )
    return stages


def _range(layout: StageLayout | None, instance_ids: tuple[str, ...]) -> tuple[int, int]:
    number = None if layout is None else next((n for n in map(layout.stage_with, instance_ids) if n is not None), None)
    if layout is None or number is None:
        return 0, 0
    first = 1 if number == 0 else layout.boundaries_tokens[number - 1] + 1
    last = layout.boundaries_tokens[number] if number < len(layout.boundaries_tokens) else 0
    return first, last


def _move(move: BoundaryRecord) -> stages_pb2.BoundaryMove:
    return stages_pb2.BoundaryMove(
        at_unix_ms=move.moved_unix_ms, instance_id=move.instance_id, boundary_tokens=move.boundary_tokens
    )
