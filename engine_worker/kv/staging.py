"""Staging buffers: bounded, reused, made when first needed."""

import numpy as np

from engine_worker.kv.memory import Buffer, KvMemory
from engine_worker.kv.plan import Message


class StagingRing:
    """The buffers of one transfer. Message n uses buffer n modulo `buffers`: a transfer has no more messages under
    way, and they complete in order."""

    def __init__(self, memory: KvMemory, buffers: int, gathered_bytes: int) -> None:
        self._memory = memory
        self._gathered_bytes = gathered_bytes
        self._buffers: list[Buffer | None] = [None] * buffers

    def buffer(self, number: int, nbytes: int) -> Buffer:
        """For message `number`, whose predecessor in the same buffer is complete. Longer messages than gathered
        ones are staged only where blocks of a region lie apart; the buffer grows for them."""
        slot = number % len(self._buffers)
        buffer = self._buffers[slot]
        if buffer is None or buffer.shape[0] < nbytes:
            buffer = self._buffers[slot] = self._memory.staging(max(nbytes, self._gathered_bytes))
        return buffer[:nbytes]


def place(memory: KvMemory, message: Message) -> Buffer | None:
    """The message's blocks in place if they lie in one piece."""
    if len(message.blocks) > 1:
        return None
    ((region, ids),) = message.blocks
    if ids[-1] - ids[0] != len(ids) - 1 or (np.diff(ids) != 1).any():
        return None
    return memory.view(region, int(ids[0]), len(ids))
