"""Migration messages to protobuf and back."""

from collections.abc import Sequence

from controlplane.protocols.migration.messages import (
    Abort,
    Accept,
    Committed,
    Failed,
    FinalMessage,
    Offer,
    Pulled,
    Refuse,
    Round,
    ToSource,
    ToTarget,
)
from engine_worker import wire
from mesh.errors import ProtocolViolation
from penstock.v1 import migration_pb2


def source_hello(instance_id: str, incarnation_id: str, kv_address: str) -> migration_pb2.SourceMessage:
    """First message of the source."""
    hello = migration_pb2.SourceHello(instance_id=instance_id, incarnation_id=incarnation_id, kv_address=kv_address)
    return migration_pb2.SourceMessage(hello=hello)


def target_hello(instance_id: str, incarnation_id: str) -> migration_pb2.TargetMessage:
    """First message of the target."""
    hello = migration_pb2.TargetHello(instance_id=instance_id, incarnation_id=incarnation_id)
    return migration_pb2.TargetMessage(hello=hello)


def offer_message(
    offer: Offer,
    model: str,
    deadline_ms: int,
    kv_token: str,
    predicted_end_tokens: int | None = None,
    predicted_band_tokens: tuple[int, int] | None = None,
) -> migration_pb2.SourceMessage:
    """An offer; `deadline_ms` is what is left of the request's time, 0 where it has no deadline."""
    request = wire.generate_message(offer.request, model=model, deadline_ms=deadline_ms, epoch=offer.epoch)
    message = migration_pb2.MigrationOffer(
        migration_id=offer.migration_id,
        request=request,
        frontend_id=offer.frontend_id,
        predicted_end_tokens=predicted_end_tokens or 0,
        predicted_low_end_tokens=0 if predicted_band_tokens is None else predicted_band_tokens[0],
        predicted_high_end_tokens=0 if predicted_band_tokens is None else predicted_band_tokens[1],
        kv_token=kv_token,
    )
    return migration_pb2.SourceMessage(offer=message)


def offer_of(message: migration_pb2.MigrationOffer) -> Offer:
    """The offer inside a message."""
    request = wire.engine_request(message.request)
    return Offer(message.migration_id, request, message.request.epoch, message.frontend_id)


def source_message(
    message: ToTarget, block_ids: Sequence[int], emitted_token_ids: Sequence[int]
) -> migration_pb2.SourceMessage:
    """Any message to the target but the offer; `block_ids` are those that it names, `emitted_token_ids` the generated
    tokens that blocks up to the last of them cover."""
    match message:
        case Round():
            round_ = migration_pb2.MigrationRound(
                migration_id=message.migration_id,
                number=message.number,
                first_block=message.first_block,
                block_ids=block_ids,
                emitted_token_ids=emitted_token_ids,
            )
            return migration_pb2.SourceMessage(round=round_)
        case FinalMessage():
            final_message = migration_pb2.MigrationFinalMessage(
                migration_id=message.migration_id,
                emitted_token_ids=message.emitted_token_ids,
                computed_tokens=message.computed_tokens,
                first_block=message.first_block,
                block_ids=block_ids,
            )
            return migration_pb2.SourceMessage(final_message=final_message)
        case Abort():
            abort = migration_pb2.MigrationAbort(migration_id=message.migration_id, reason=message.reason)
            return migration_pb2.SourceMessage(abort=abort)
        case Offer():
            raise TypeError("an offer has a function of its own")


def target_message(message: ToSource) -> migration_pb2.TargetMessage:
    """Any message to the source."""
    migration_id = message.migration_id
    match message:
        case Accept():
            return migration_pb2.TargetMessage(accept=migration_pb2.MigrationAccept(migration_id=migration_id))
        case Refuse(reason=reason):
            refuse = migration_pb2.MigrationRefuse(migration_id=migration_id, reason=reason)
            return migration_pb2.TargetMessage(refuse=refuse)
        case Pulled(number=number):
            pulled = migration_pb2.MigrationPulled(migration_id=migration_id, number=number)
            return migration_pb2.TargetMessage(pulled=pulled)
        case Committed():
            committed = migration_pb2.MigrationCommitted(migration_id=migration_id)
            return migration_pb2.TargetMessage(committed=committed)
        case Failed(reason=reason):
            failed = migration_pb2.MigrationFailed(migration_id=migration_id, reason=reason)
            return migration_pb2.TargetMessage(failed=failed)


def to_source(message: migration_pb2.TargetMessage) -> ToSource:
    """What the target said. Raises `ProtocolViolation` for an empty message or a second hello."""
    match message.WhichOneof("message"):
        case "accept":
            return Accept(message.accept.migration_id)
        case "refuse":
            return Refuse(message.refuse.migration_id, message.refuse.reason)
        case "pulled":
            return Pulled(message.pulled.migration_id, message.pulled.number)
        case "committed":
            return Committed(message.committed.migration_id)
        case "failed":
            return Failed(message.failed.migration_id, message.failed.reason)
        case other:
            raise ProtocolViolation(f"after its hello the target of a migration must not send {other}")


def to_target(message: migration_pb2.SourceMessage) -> Round | FinalMessage | Abort:
    """What the source said after its offer. Raises `ProtocolViolation` for an empty message or a second hello."""
    match message.WhichOneof("message"):
        case "round":
            round_ = message.round
            return Round(round_.migration_id, round_.number, round_.first_block, len(round_.block_ids))
        case "final_message":
            last = message.final_message
            return FinalMessage(
                last.migration_id,
                tuple(last.emitted_token_ids),
                last.computed_tokens,
                last.first_block,
                len(last.block_ids),
            )
        case "abort":
            return Abort(message.abort.migration_id, message.abort.reason)
        case other:
            raise ProtocolViolation(f"after its hello the source of a migration must not send {other}")
