"""The engine core's end of a server that was started with our connector, without KV: a test says what becomes of its
requests."""

import asyncio
from collections.abc import Sequence

from engine_worker.engines.vllm.connector.control import ServedControl
from engine_worker.engines.vllm.connector.messages import (
    Answer,
    Command,
    Describe,
    Described,
    EndedInstead,
    ExpectPause,
    PausedNotice,
    States,
)
from engine_worker.kv.layout import KvLayout
from engine_worker.kv.settings import KvTransferSettings
from engine_worker.kv.transfer import AgentDescription
from mesh.runtime import SystemClock

SECRET = "between us"


class FakeConnector:
    """Listens from its making on."""

    def __init__(self, endpoint: str, block_tokens: int) -> None:
        self.endpoint = endpoint
        self.block_tokens = block_tokens
        self.heard: list[Command] = []
        self._control = ServedControl(endpoint, "", SECRET, SystemClock(), lambda: None)
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            call = await self._control.receive()
            self.heard.append(call.command)
            match call.command:
                case Describe():
                    layout = KvLayout("demo-small", "float32", self.block_tokens, (64,))
                    about = AgentDescription("fake", 7300, layout, KvTransferSettings(host="10.0.0.5"))
                    answer = Answer(call.number, Described(about))
                case ExpectPause(request_id):
                    answer = Answer(call.number, f"cmpl-{request_id}-1-0-abcdefgh")
                case _:
                    answer = Answer(call.number)
            await self._control.send(answer)

    async def pause(self, request_id: str, generated: Sequence[int], computed_tokens: int) -> None:
        """The server has aborted a request, and holds its blocks."""
        blocks = tuple(range(-(-computed_tokens // self.block_tokens)))
        await self._control.send(PausedNotice(request_id, f"{request_id}-x", tuple(generated), computed_tokens, blocks))

    async def end_instead(self, request_id: str) -> None:
        """The request has ended before it was aborted."""
        await self._control.send(EndedInstead(request_id))

    async def tell(self, states: bytes) -> None:
        """Hidden states of a step."""
        await self._control.send(States(states))

    async def close(self) -> None:
        """As a server that ends."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._control.close()
