"""Cascades between Python and protobuf."""

from controlplane.model.cascade_record import CascadeRecord
from mesh.errors import ConfigurationError
from penstock.v1 import cascade_pb2


def record_from(message: cascade_pb2.CascadeDescription) -> CascadeRecord:
    """Raises `ConfigurationError` for a value that a record does not have."""
    without_judge = message.without_judge or "escalate"
    if without_judge not in ("escalate", "accept"):
        raise ConfigurationError(f"without_judge is escalate or accept, got {without_judge!r}")
    return CascadeRecord(
        name=message.name,
        tiers=tuple(message.tiers),
        thresholds=tuple(message.thresholds),
        judges=tuple(message.judges) or ("confidence",),
        without_judge="accept" if without_judge == "accept" else "escalate",
        expected_s=tuple(message.expected_s),
        plan_revision=message.plan_revision,
    )


def message_from(record: CascadeRecord) -> cascade_pb2.CascadeDescription:
    """The same as a message."""
    return cascade_pb2.CascadeDescription(
        name=record.name,
        tiers=record.tiers,
        thresholds=record.thresholds,
        judges=record.judges,
        without_judge=record.without_judge,
        expected_s=record.expected_s,
        plan_revision=record.plan_revision,
    )
