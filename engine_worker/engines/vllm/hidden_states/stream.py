"""The worker process's end: captured states, with the mesh's request ids."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import zmq.asyncio
from zmq.constants import SocketOption, SocketType

from engine_worker.engines.hidden_state_source import HiddenStates
from engine_worker.engines.vllm.hidden_states.message import CapturedStates, request_id_of

_WAITING_MESSAGES = 64


class HiddenStateStream:
    """Binds the endpoint, before the engine core connects."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(SocketType.PULL)
        self._socket.setsockopt(SocketOption.RCVHWM, _WAITING_MESSAGES)
        self._socket.bind(endpoint)
        self._decoder = msgspec.msgpack.Decoder(CapturedStates)
        self._is_closed = False

    async def states(self) -> AsyncIterator[HiddenStates]:
        """Yields captured states until the stream is closed."""
        while not self._is_closed:
            try:
                captured = self._decoder.decode(await self._socket.recv())
            except asyncio.CancelledError:
                # Closing a socket cancels whoever waits for it, as if the task itself had been cancelled.
                if self._is_closed:
                    return
                raise
            yield HiddenStates(
                step=captured.step,
                request_ids=tuple(request_id_of(internal_id) for internal_id in captured.internal_ids),
                context_tokens=tuple(captured.context_tokens),
                hidden_size=captured.hidden_size,
                states=captured.states,
            )

    def close(self) -> None:
        """End `states` and close the socket without waiting for messages under way."""
        self._is_closed = True
        self._context.destroy(linger=0)
