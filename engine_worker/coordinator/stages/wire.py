"""Bid-ask messages and stage reports to protobuf and back."""

from collections.abc import Callable
from typing import Any

from controlplane.policies.stages.neighbours import StageReport
from controlplane.policies.stages.refinement import RequestLength
from controlplane.protocols.bid_ask.messages import (
    Accepted,
    Ask,
    Award,
    Begun,
    Bid,
    Busy,
    Done,
    Message,
    Pass,
    Ready,
    Refused,
    Starving,
    Withdrawn,
)
from mesh.errors import ProtocolViolation
from penstock.v1 import stages_pb2

_OFFER = ("ask_id", "request_id", "context_tokens", "sender_load_tokens", "frontend_id")
# Fields have the names of the messages' attributes, in both worlds.
_KINDS: dict[str, tuple[type[Any], Callable[..., Any], tuple[str, ...]]] = {
    "ask": (Ask, stages_pb2.BidAskAsk, _OFFER),
    "bid": (Bid, stages_pb2.BidAskBid, ("ask_id", "load_tokens", "earliest_start_ms")),
    "pass": (Pass, stages_pb2.BidAskPass, ("ask_id", "reason")),
    "award": (Award, stages_pb2.BidAskAward, _OFFER),
    "accepted": (Accepted, stages_pb2.BidAskAccepted, ("ask_id",)),
    "refused": (Refused, stages_pb2.BidAskRefused, ("ask_id", "reason")),
    "ready": (Ready, stages_pb2.BidAskReady, ("ask_id", "attempt")),
    "starving": (Starving, stages_pb2.BidAskStarving, ("ask_id", "attempt")),
    "begun": (Begun, stages_pb2.BidAskBegun, ("ask_id",)),
    "busy": (Busy, stages_pb2.BidAskBusy, ("ask_id", "attempt")),
    "withdrawn": (Withdrawn, stages_pb2.BidAskWithdrawn, ("ask_id", "reason")),
    "done": (Done, stages_pb2.BidAskDone, ("ask_id", "moved")),
}
_NAMES = {kind: name for name, (kind, _, _) in _KINDS.items()}


def hello(instance_id: str, incarnation_id: str, listener_incarnation_id: str) -> stages_pb2.StageMessage:
    """The first message on every stream."""
    return stages_pb2.StageMessage(
        hello=stages_pb2.StageHello(
            instance_id=instance_id,
            incarnation_id=incarnation_id,
            listener_incarnation_id=listener_incarnation_id,
        )
    )


def stage_message(message: Message | StageReport) -> stages_pb2.StageMessage:
    """Any message after the hello."""
    if isinstance(message, StageReport):
        report = stages_pb2.StageReport(
            load_tokens=message.load_tokens,
            boundary_tokens=message.boundary_tokens,
            input_tokens=[length.input_tokens for length in message.lengths],
            total_tokens=[length.total_tokens for length in message.lengths],
        )
        return stages_pb2.StageMessage(report=report)
    name = _NAMES[type(message)]
    _, make, fields = _KINDS[name]
    return stages_pb2.StageMessage(**{name: make(**{field: getattr(message, field) for field in fields})})


def to_message(message: stages_pb2.StageMessage) -> Message | StageReport:
    """What was said. Raises `ProtocolViolation` for an empty message or a second hello."""
    name = message.WhichOneof("message")
    if name == "report":
        return _report(message.report)
    if name not in _KINDS:
        raise ProtocolViolation(f"after its hello a worker must not send {name or 'an empty message'} about stages")
    kind, _, fields = _KINDS[name]
    said = getattr(message, name)
    found: Message = kind(*(getattr(said, field) for field in fields))
    return found


def _report(report: stages_pb2.StageReport) -> StageReport:
    if len(report.input_tokens) != len(report.total_tokens):
        raise ProtocolViolation("a stage report has as many input as total lengths")
    boundary = report.boundary_tokens if report.HasField("boundary_tokens") else None
    lengths = tuple(map(RequestLength, report.input_tokens, report.total_tokens))
    return StageReport(report.load_tokens, boundary, lengths)
