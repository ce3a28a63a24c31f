"""A GPU of which the test says when its streams get on: arrays stand for its memory."""

import random
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


class Stream:
    """Work in order, done one piece at a time."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.done = 0

    def step(self) -> None:
        """Do the next piece, if there is one."""
        if self.done < len(self.work):
            self.work[self.done]()
            self.done += 1


class PointInStream:
    """An event: reached once all that was in the stream before it is done."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._after = len(stream.work)

    def query(self) -> bool:
        return self._stream.done >= self._after


class FakeGpu:
    """Implements `Accelerator`."""

    def __init__(self) -> None:
        self.engine, self.copies = Stream(), Stream()
        self.kernels = 0
        self.pinned_bytes = 0
        self.is_used = False

    def step(self, chance: random.Random) -> None:
        """One of the two streams gets on."""
        chance.choice((self.engine, self.copies)).step()

    def use_in_this_thread(self) -> None:
        self.is_used = True

    def mark_engine(self) -> PointInStream:
        return PointInStream(self.engine)

    def mark_copies(self) -> PointInStream:
        return PointInStream(self.copies)

    def device_buffer(self, nbytes: int) -> np.ndarray:
        return np.zeros(nbytes, np.uint8)

    def pinned_buffer(self, nbytes: int) -> np.ndarray:
        self.pinned_bytes += nbytes
        return np.zeros(nbytes, np.uint8)

    def gather_rows(self, source: np.ndarray, rows: NDArray[np.int64], into: np.ndarray) -> None:
        self.kernels += 1
        self.copies.work.append(lambda: np.copyto(into.reshape(len(rows), *source.shape[1:]), source[rows]))

    def scatter_rows(self, content: np.ndarray, rows: NDArray[np.int64], target: np.ndarray) -> None:
        self.kernels += 1
        self.copies.work.append(lambda: target.__setitem__(rows, content.reshape(len(rows), *target.shape[1:])))
