"""The engine core's end of the control channel.

Either a worker has started this engine core, and listens where it was told, or the server runs by itself: then it
listens here, and workers come and go, one at a time. What one had asked for is let go when it leaves or falls silent.
"""

import hmac
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol

import msgspec
import zmq.asyncio
from zmq.constants import SocketOption, SocketType
from zmq.error import ZMQError

from engine_worker.engines.vllm.connector.endpoint import TOKEN_VARIABLE, UNIX, check_endpoint
from engine_worker.engines.vllm.connector.messages import Answer, Attach, Beat, Call, Detach, FromCore
from mesh.errors import ConfigurationError
from mesh.runtime import Clock

log = logging.getLogger(__name__)

BEAT_S: Final = 1.0
"""How often an attached worker says that it lives."""
SILENT_S: Final = 10.0
"""After which it is taken for gone. Blocks that it had held are nobody's then, and the server needs them."""


class Control(Protocol):
    """One end, on one event loop."""

    async def receive(self) -> Call:
        """The next command of the worker that is there."""

    async def send(self, message: FromCore) -> None:
        """Lost where no worker is there."""

    def has_fallen_silent(self) -> bool:
        """Whether the worker that was there is gone without a word; True once of each."""

    def close(self) -> None:
        """At once; what is under way is lost."""


class OwnControl:
    """To the worker that started this process, and which ends it."""

    def __init__(self, endpoint: str) -> None:
        self._socket: Any = _socket(SocketType.DEALER)
        self._socket.connect(endpoint)
        self._decoder = msgspec.msgpack.Decoder(Call)

    async def receive(self) -> Call:
        """See `Control`."""
        return self._decoder.decode(await self._socket.recv())

    async def send(self, message: FromCore) -> None:
        """See `Control`."""
        await self._socket.send(msgspec.msgpack.encode(message))

    def has_fallen_silent(self) -> bool:
        """Never: the kernel ends this process with its worker."""
        return False

    def close(self) -> None:
        """See `Control`."""
        self._socket.close()


class ServedControl:
    """To whichever worker is attached now."""

    def __init__(self, endpoint: str, token: str, secret: str, clock: Clock, on_leave: Callable[[], None]) -> None:
        """Listens at once. `secret` is told to those that are let in. `on_leave`: the worker has said that it goes.
        Raises `ConfigurationError` for an endpoint that is taken, or that others could reach."""
        check_endpoint(endpoint, token)
        self._token = token
        self._secret = secret
        self._clock = clock
        self._on_leave = on_leave
        self._worker = b""
        """ZMQ's name of the one that is there; empty: none."""
        self._heard_s = 0.0
        self._decoder = msgspec.msgpack.Decoder(Call)
        self._socket: Any = _socket(SocketType.ROUTER)
        try:
            self._socket.bind(endpoint)
            if endpoint.startswith(UNIX):
                os.chmod(endpoint.removeprefix(UNIX), 0o600)
        except (OSError, ZMQError) as error:
            raise ConfigurationError(f"the control socket cannot be opened at {endpoint}: {error}") from error

    async def receive(self) -> Call:
        """See `Control`. Whoever has not been let in is told so."""
        while True:
            sender, content = await self._socket.recv_multipart()
            try:
                call = self._decoder.decode(content)
            except msgspec.MsgspecError as error:
                log.warning("the control socket was sent what is no command", extra={"reason": str(error)})
                continue
            if isinstance(call.command, Attach):
                await self._let_in(sender, call.number, call.command)
            elif sender != self._worker:
                await self._answer(sender, _refused(call.number, "this worker is not attached, or was given up"))
            elif isinstance(call.command, Beat | Detach):
                self._heard_s = self._clock.now_s()
                await self._answer(sender, Answer(call.number))
                if isinstance(call.command, Detach):
                    self._worker = b""
                    self._on_leave()
            else:
                return call

    async def send(self, message: FromCore) -> None:
        """See `Control`."""
        if self._worker:
            await self._answer(self._worker, message)

    def has_fallen_silent(self) -> bool:
        """See `Control`."""
        if not self._worker or self._clock.now_s() - self._heard_s < SILENT_S:
            return False
        log.warning("the attached worker has fallen silent; what it had held is let go")
        self._worker = b""
        return True

    def close(self) -> None:
        """See `Control`."""
        self._socket.close()

    async def _let_in(self, sender: bytes, number: int, attach: Attach) -> None:
        if not hmac.compare_digest(attach.token.encode(), self._token.encode()):
            log.warning("a worker with another token was turned away")
            reason = f"{TOKEN_VARIABLE} is another one at the server"
            await self._answer(sender, Answer(number, error="ConfigurationError", message=reason))
        elif self._worker not in (b"", sender):
            silence_s = self._clock.now_s() - self._heard_s
            reason = f"the server has a worker, which was last heard {silence_s:.1f} s ago; it is given up after "
            await self._answer(sender, _refused(number, f"{reason}{SILENT_S:g} s"))
        else:
            self._worker, self._heard_s = sender, self._clock.now_s()
            await self._answer(sender, Answer(number, self._secret))

    async def _answer(self, receiver: bytes, message: FromCore) -> None:
        # A worker that is gone and one that does not read are the same: its silence ends it.
        with suppress(ZMQError):
            await self._socket.send_multipart([receiver, msgspec.msgpack.encode(message)])


def _refused(number: int, reason: str) -> Answer:
    return Answer(number, error="KvTransferRefused", message=reason)


def _socket(kind: SocketType) -> Any:
    socket = zmq.asyncio.Context.instance().socket(kind)
    socket.setsockopt(SocketOption.LINGER, 0)
    return socket
