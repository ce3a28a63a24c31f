"""The worker process's end of the control channel to the bridge in the engine core (see `control` for the other)."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from itertools import count
from typing import Any

import msgspec
import zmq.asyncio
from zmq.constants import SocketOption, SocketType

import mesh.errors
from engine_worker.engines.vllm.connector.messages import (
    Answer,
    Call,
    Command,
    FromCore,
    Notice,
    Value,
)
from mesh.errors import EngineFailed
from mesh.tasks import TaskSet


class CoreChannel:
    """Calls with answers, and notices; on one event loop. Commands reach the core in the order in which they are given,
    whether or not their answers are awaited."""

    def __init__(self, endpoint: str, on_notice: Callable[[Notice], None], *, connects: bool = False) -> None:
        """Binds the endpoint, before the engine core connects; or `connects` to that of a server that runs already."""
        self._socket: Any = zmq.asyncio.Context.instance().socket(SocketType.DEALER)
        self._socket.setsockopt(SocketOption.LINGER, 0)
        (self._socket.connect if connects else self._socket.bind)(endpoint)
        self._on_notice = on_notice
        self._numbers = count()
        self._calls: dict[int, asyncio.Future[Value]] = {}
        self._tasks = TaskSet("vllm channel")
        self._tasks.spawn(self._listen(), name="listen", on_error=lambda error: self.fail(repr(error)))
        self._failure = ""

    async def call(self, command: Command) -> int | str:
        """The core's answer to what is answered with a plain value; errors as of `ask`."""
        value = await self.ask(command)
        assert isinstance(value, int | str), f"the core answered a {type(command).__name__} with {value}"
        return value

    def ask(self, command: Command) -> Coroutine[Any, Any, Value]:
        """The core's answer, once it is awaited; the command is on its way at once. Raises what the core raised, and
        `EngineFailed` if it dies."""
        if self._failure:
            return self._refuse()
        number = next(self._numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        return self._answer(number, self._socket.send(msgspec.msgpack.encode(Call(number, command))), answer)

    def send(self, command: Command) -> None:
        """Call without waiting; a failure is logged."""
        # Not a task that asks: it would begin after whatever is asked next, and a pause would overtake its export.
        self._tasks.spawn(self.ask(command), name=type(command).__name__)

    def fail(self, reason: str) -> None:
        """The core is dead: nobody will answer."""
        self._failure = self._failure or reason
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(EngineFailed(self._failure))

    async def close(self) -> None:
        """End all calls with `EngineFailed`."""
        self.fail("the engine was stopped")
        await self._tasks.cancel()
        self._socket.close()

    async def _answer(self, number: int, sent: Awaitable[Any], answer: asyncio.Future[Value]) -> Value:
        try:
            await sent
            return await answer
        finally:
            self._calls.pop(number, None)

    async def _refuse(self) -> Value:
        raise EngineFailed(self._failure)

    async def _listen(self) -> None:
        decoder: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)
        while True:
            message = decoder.decode(await self._socket.recv())
            if isinstance(message, Answer):
                self._answered(message)
            else:
                self._on_notice(message)

    def _answered(self, answer: Answer) -> None:
        future = self._calls.get(answer.number)
        if future is None or future.done():
            return
        if answer.error:
            future.set_exception(getattr(mesh.errors, answer.error)(answer.message))
        else:
            future.set_result(answer.value)
