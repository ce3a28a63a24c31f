"""The target's end of the stream between two workers."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, NoReturn, TypeAlias

import grpc

from engine_worker.coordinator import wire
from engine_worker.coordinator.incoming import IncomingMigrations
from engine_worker.coordinator.link import MAX_UNSENT_MESSAGES
from engine_worker.instance import Instance
from mesh.errors import IllegalTransition, ProtocolViolation
from mesh.rpc.outbox import LossyOutbox
from penstock.v1 import migration_pb2, migration_pb2_grpc

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0

Context: TypeAlias = grpc.aio.ServicerContext
Inbound: TypeAlias = AsyncIterator[migration_pb2.SourceMessage]


class MigrationService(migration_pb2_grpc.MigrationServicer):
    """Takes the streams on which other workers offer their requests, and gives each to the migrations to here."""

    def __init__(self, instance: Instance, incoming: IncomingMigrations) -> None:
        self._instance = instance
        self._incoming = incoming

    async def Exchange(self, inbound: Inbound, context: Context) -> None:
        """All migrations from one source; its end is the source's death."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await _read_hello(inbound)
        except TimeoutError:
            await _abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, "no hello came; send SourceHello first")
        except ProtocolViolation as error:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        description = self._instance.description
        # Before anything may abort: a status that comes while grpc.aio sends the first message is never sent.
        await context.write(wire.target_hello(description.instance_id, description.incarnation_id))
        outbox = LossyOutbox[migration_pb2.TargetMessage](f"worker {hello.instance_id}", MAX_UNSENT_MESSAGES)
        connection = self._incoming.connect(hello, outbox.put)
        writer = asyncio.create_task(_write(outbox, context))
        try:
            async for message in inbound:
                self._incoming.receive(connection, message)
        except ProtocolViolation as error:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except IllegalTransition as error:
            log.exception("a source broke the migration protocol", extra={"instance_id": hello.instance_id})
            await _abort(context, grpc.StatusCode.INTERNAL, str(error))
        finally:
            writer.add_done_callback(_end_heard)
            writer.cancel()
            self._incoming.disconnect(connection)


async def _read_hello(inbound: Inbound) -> migration_pb2.SourceHello:
    async for message in inbound:
        if not message.HasField("hello") or not message.hello.instance_id:
            raise ProtocolViolation("the first message must be a SourceHello with an instance_id")
        return message.hello
    raise ProtocolViolation("the stream ended before its hello")


async def _write(outbox: LossyOutbox[migration_pb2.TargetMessage], context: Any) -> None:
    async for message in outbox:
        await context.write(message)


def _end_heard(writer: asyncio.Task[None]) -> None:
    """Where writing failed, reading did too and has said why."""
    if not writer.cancelled():
        writer.exception()


async def _abort(context: Context, code: grpc.StatusCode, message: str) -> NoReturn:
    await context.abort(code, message)
    raise AssertionError("abort returned")
