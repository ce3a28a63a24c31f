"""A source or a target that a test plays itself, message by message, against one whole worker."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from mesh.announcement import Announcement
from mesh.membership import Member
from mesh.rpc.server import RpcServer
from mesh.runtime import GrpcTransport
from penstock.v1 import migration_pb2, migration_pb2_grpc
from tests.unit.engine_worker.coordinator.running_workers import WAIT_S, Worker

INCARNATION = "00000fed"


class ScriptedTarget(migration_pb2_grpc.MigrationServicer):
    """Says what the test tells it to; `lose` ends its stream as its death would."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[migration_pb2.SourceMessage] = asyncio.Queue()
        self.incarnation_id = INCARNATION
        self._answers: asyncio.Queue[migration_pb2.TargetMessage | None] = asyncio.Queue()

    async def Exchange(self, inbound: Any, context: Any) -> None:
        reader = asyncio.create_task(self._read(inbound))
        try:
            hello = migration_pb2.TargetHello(instance_id="z", incarnation_id=self.incarnation_id)
            await context.write(migration_pb2.TargetMessage(hello=hello))
            while (answer := await self._answers.get()) is not None:
                await context.write(answer)
        finally:
            reader.cancel()

    def say(self, **message: Any) -> None:
        self._answers.put_nowait(migration_pb2.TargetMessage(**message))

    def lose(self) -> None:
        self._answers.put_nowait(None)

    async def hear(self, kind: str) -> Any:
        """The next message of this kind; others are passed over."""
        async with asyncio.timeout(WAIT_S):
            while (message := await self.heard.get()).WhichOneof("message") != kind:
                continue
        return getattr(message, kind)

    async def accept(self) -> str:
        """Take the next offer and every round; returns the migration's id once the request is paused and sent."""
        offer = await self.hear("offer")
        self.say(accept=migration_pb2.MigrationAccept(migration_id=offer.migration_id))
        async with asyncio.timeout(WAIT_S):
            while (message := await self.heard.get()).WhichOneof("message") != "final_message":
                if message.HasField("round"):
                    number = message.round.number
                    self.say(pulled=migration_pb2.MigrationPulled(migration_id=offer.migration_id, number=number))
        return str(offer.migration_id)

    async def _read(self, inbound: Any) -> None:
        async for message in inbound:
            self.heard.put_nowait(message)


@asynccontextmanager
async def scripted_target(source: Worker) -> AsyncIterator[ScriptedTarget]:
    """Announced as instance "z" beside `source`."""
    target, server = ScriptedTarget(), RpcServer(GrpcTransport())
    server.add(migration_pb2_grpc.add_MigrationServicer_to_server, target, "penstock.v1.Migration")
    await server.start()
    await source.context.directory.follow("worker")
    like = source.context.directory.members("worker")[0]
    member = Member("worker", "z", INCARNATION, server.address, "", like.attributes)
    announcement = Announcement(source.context.store, member)
    await announcement.start()
    await source.context.directory.wait_for("worker", 2, WAIT_S)
    try:
        yield target
    finally:
        target.lose()
        await announcement.withdraw()
        await server.stop(0.1)


class ScriptedSource:
    """Plays a source towards one worker."""

    def __init__(self, target: Worker) -> None:
        self.call: Any = migration_pb2_grpc.MigrationStub(target.channel).Exchange()  # type: ignore[no-untyped-call]

    async def hello(self, kv_address: str = "127.0.0.1:9") -> Any:
        await self.say(hello=migration_pb2.SourceHello(instance_id="z", incarnation_id="1", kv_address=kv_address))
        return await self.read()

    async def say(self, **message: Any) -> None:
        await self.call.write(migration_pb2.SourceMessage(**message))

    async def read(self) -> Any:
        async with asyncio.timeout(WAIT_S):
            message = await self.call.read()
        assert message is not grpc.aio.EOF
        return message

    def lose(self) -> None:
        """Its death."""
        self.call.cancel()
