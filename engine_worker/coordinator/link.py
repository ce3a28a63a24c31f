"""The source's end of the stream to one incarnation of another worker."""

import asyncio
import logging
from collections.abc import Callable

import grpc

from mesh.errors import IllegalTransition, PenstockError, ProtocolViolation
from mesh.membership import Member
from mesh.rpc.client import open_channel, rpc_error
from mesh.rpc.outbox import LossyOutbox
from mesh.runtime import Transport
from penstock.v1 import migration_pb2, migration_pb2_grpc

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 1.0
MAX_UNSENT_MESSAGES = 1024
"""Waiting for one peer; what does not fit is lost, as the protocol allows."""


class TargetLink:
    """Its stream's end is the target's death: `run` returns the reason then, and the link is of no more use."""

    def __init__(
        self,
        target: Member,
        hello: migration_pb2.SourceMessage,
        receive: Callable[[migration_pb2.TargetMessage], None],
        transport: Transport,
    ) -> None:
        self.target = target
        self._transport = transport
        self._outbox = LossyOutbox[migration_pb2.SourceMessage](f"worker {target.member_id}", MAX_UNSENT_MESSAGES)
        self._outbox.put(hello)
        self._receive = receive

    def send(self, message: migration_pb2.SourceMessage) -> None:
        """Queue a message."""
        self._outbox.put(message)

    async def run(self) -> str:
        """Talk until the stream ends; returns why it did."""
        peer = f"worker {self.target.member_id} at {self.target.address}"
        async with open_channel(self._transport, self.target.address, self.target.role) as channel:
            stub = migration_pb2_grpc.MigrationStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Exchange()
            writer = asyncio.create_task(self._write(call))
            try:
                await self._greet(call)
                while (message := await call.read()) is not grpc.aio.EOF:
                    self._receive(message)
                return f"{peer} ended the stream"
            except TimeoutError:
                return f"{peer} did not answer within {HELLO_TIMEOUT_S:g} s"
            except grpc.aio.AioRpcError as error:
                return str(rpc_error(error, peer))
            except IllegalTransition:
                log.exception("a target broke the migration protocol", extra={"instance_id": self.target.member_id})
                return f"{peer} broke the migration protocol"
            except PenstockError as error:
                return str(error)
            finally:
                call.cancel()
                writer.cancel()
                # Where writing failed, reading did too and has said why.
                await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:
        async for message in self._outbox:
            await call.write(message)

    async def _greet(self, call: grpc.aio.StreamStreamCall) -> None:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            answer = await call.read()
        if answer is grpc.aio.EOF or not answer.HasField("hello"):
            raise ProtocolViolation(f"worker {self.target.member_id} did not begin with a hello")
        if answer.hello.incarnation_id != self.target.incarnation_id:
            raise ProtocolViolation(
                f"worker {self.target.member_id} is incarnation {answer.hello.incarnation_id} by now, announced was "
                f"{self.target.incarnation_id}; try again"
            )
