"""The part of `penstock status` about length prediction."""

import asyncio
import math
from typing import Any

from google.protobuf.message import Message
from rich.markup import escape

from mesh.errors import RpcError
from mesh.membership import Directory, Member
from penstock.v1 import predictor_pb2, predictor_pb2_grpc
from services.cli.connection import call
from services.cli.proto_json import plain


async def gather_prediction(directory: Directory) -> dict[str, Any]:
    """The artefacts that predictors serve, and where each worker's remaining lengths come from."""
    predictors, workers = directory.members("predictor"), directory.members("worker")
    artefacts, states = predictor_pb2.GetArtefactRequest(), predictor_pb2.GetPredictionStateRequest()
    return {
        "predictors": await asyncio.gather(
            *(_ask(member, predictor_pb2_grpc.LengthPredictorStub, "GetArtefact", artefacts) for member in predictors)
        ),
        "workers": await asyncio.gather(
            *(_ask(member, predictor_pb2_grpc.LengthPredictionStub, "GetState", states) for member in workers)
        ),
    }


def prediction_lines(prediction: dict[str, Any]) -> list[str]:
    """For people: artefacts, and the workers by where their lengths come from; what is not as it should be in red."""
    return [
        *(line for predictor in prediction["predictors"] for line in _predictor_lines(predictor)),
        *_worker_lines(prediction["workers"]),
        *_loop_lines(prediction["workers"]),
    ]


def _predictor_lines(predictor: dict[str, Any]) -> list[str]:
    name = f"predictor {predictor['member_id']}"
    if "error" in predictor:
        return [f"[red]{name}: {escape(predictor['error'])}[/]"]
    if not predictor["folders"] and not predictor["learns"]:
        return [f"{name}: no artefact; workers go on with {predictor['fallback']}"]
    lines = [_learnt_line(name, model) for model in predictor["learnt"]]
    if not predictor["folders"] and not lines:
        lines.append(f"{name}: learns from requests that end; none has ended yet")
    for folder in predictor["folders"]:
        if folder["artefact"]:
            error = f"{folder['test_mae_tokens']:.1f} tokens of error on held-out requests"
            lines.append(f"{name}: {folder['artefact']} ({folder['inputs']}, {error})")
        if folder["refused"]:
            lines.append(f"[red]{name}: {escape(folder['folder'])} is not in force: {escape(folder['refused'])}[/]")
    return lines


def _learnt_line(name: str, model: dict[str, Any]) -> str:
    states = f"states of width {model['hidden_size']}" if model["hidden_size"] else "no hidden states"
    said = f"{name}: {escape(model['model'])} learnt from {model['ended_requests']} requests ({states})"
    errors = (
        f"{float(model['mae_tokens']):.1f} tokens of error, {float(model['residual_mae_tokens']):.1f} by residual life"
    )
    if math.isnan(float(model["mae_tokens"])):
        return f"{said}, not judged yet"
    who = "" if model["is_network"] else " (which answers)"
    said += f", {errors}{who}, {float(model['coverage']):.0%} within the range"
    return f"[red]{said}; drifted {model['drifts']} times[/]" if model["drifts"] else said


def _worker_lines(workers: list[dict[str, Any]]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for worker in workers:
        groups.setdefault(_worker_line(worker), []).append(worker["member_id"])
    return [line.format(names=", ".join(names)) for line, names in groups.items()]


def _loop_lines(workers: list[dict[str, Any]]) -> list[str]:
    return [
        f"[red]{escape(worker['member_id'])}: {worker['looping_requests']} answers go round in circles[/]"
        for worker in workers
        if worker.get("looping_requests")
    ]


def _worker_line(worker: dict[str, Any]) -> str:
    if "error" in worker:
        return f"[red]remaining lengths of {{names}}: {_plain(worker['error'])}[/]"
    if worker["source"] == "off":
        return "remaining lengths of {names}: not predicted"
    said = f"remaining lengths of {{names}}: {worker['source']}"
    if worker["artefact"]:
        said += f", {_plain(worker['artefact'])}"
    said += f", every {worker['every_steps']} steps"
    return f"[red]{said}: {_plain(worker['reason'])}[/]" if worker["reason"] else said


def _plain(text: str) -> str:
    return escape(text).replace("{", "{{").replace("}", "}}")


async def _ask(member: Member, stub: Any, method: str, request: Message) -> dict[str, Any]:
    try:
        return {"member_id": member.member_id, **plain(await call(member, stub, method, request))}
    except RpcError as error:
        return {"member_id": member.member_id, "error": str(error)}
