"""Brings captured rows to the worker's process, beside the engine's steps."""

import logging
import queue
import threading
from collections.abc import Callable

import msgspec
import numpy as np
from zmq.constants import SocketOption, SocketType
from zmq.sugar.context import Context

from engine_worker.engines.vllm.hidden_states.capture import Rows
from engine_worker.engines.vllm.hidden_states.message import CapturedStates

log = logging.getLogger(__name__)

_WAITING_STEPS = 16
"""Captured steps that may wait for the sender. Where there is no room, the next step's rows wait or are dropped."""
_WAITING_MESSAGES = 64


class HiddenStateSender:
    """A thread with a socket. It, not the engine's step, waits for the copy from a GPU and for room in the socket."""

    def __init__(self, open_send: Callable[[], Callable[[bytes], None]]) -> None:
        """`open_send`: called in the thread; see `push_to`."""
        self._open_send = open_send
        self.patience_s = 0.0
        """How long a step waits in `put` for room before its rows are dropped."""
        self._rows: queue.Queue[Rows] = queue.Queue(_WAITING_STEPS)
        self.dropped_steps_total = 0
        threading.Thread(target=self._run, name="hidden-states", daemon=True).start()

    def put(self, rows: Rows) -> None:
        """Send rows, or drop them if the thread lags for longer than `patience_s`."""
        try:
            self._rows.put(rows, timeout=self.patience_s)
        except queue.Full:
            self.dropped_steps_total += 1
            if self.dropped_steps_total == 1:
                log.warning("captured hidden states are dropped: they come faster than they are taken")

    def _run(self) -> None:
        send = self._open_send()
        while True:
            send(message_bytes(self._rows.get()))


def push_to(endpoint: str) -> Callable[[bytes], None]:
    """A socket to the worker's process, for the thread that calls this. What is returned waits until there is room for
    the message."""
    socket = Context.instance().socket(SocketType.PUSH)
    socket.setsockopt(SocketOption.LINGER, 0)
    socket.setsockopt(SocketOption.SNDHWM, _WAITING_MESSAGES)
    socket.connect(endpoint)

    def send(message: bytes) -> None:
        socket.send(message)

    return send


def message_bytes(rows: Rows) -> bytes:
    """What is sent of a step; waits for the copy from a GPU."""
    if rows.ready is not None:
        rows.ready.synchronize()
    states = np.ascontiguousarray(rows.states.float().cpu().numpy(), dtype="<f4")
    captured = CapturedStates(
        step=rows.step,
        internal_ids=list(rows.internal_ids),
        context_tokens=list(rows.context_tokens),
        hidden_size=states.shape[1],
        states=states.tobytes(),
    )
    return msgspec.msgpack.encode(captured)
