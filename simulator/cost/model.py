"""The interface of cost models: the batch of a step in, its duration out."""

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray


def _no_contexts() -> NDArray[np.int64]:
    return np.zeros(0, dtype=np.int64)


class PrefillChunk(msgspec.Struct, frozen=True):
    """A part of a prompt that one step computes."""

    new_tokens: int
    context_tokens: int
    """Tokens before the chunk whose KV is there already; the chunk attends to them too."""


class BatchShape(msgspec.Struct, frozen=True, eq=False):
    """The lengths within one engine step; all that a step's duration depends on."""

    prefill: Sequence[PrefillChunk] = ()
    decode_context_tokens: NDArray[np.int64] = msgspec.field(default_factory=_no_contexts)
    """Context (the token being computed included) of each decoding request, in no particular order."""
    decode_context_tokens_sum: int = 0
    """Their sum, which the instance keeps anyway; cost models that need no more stay O(1)."""

    @property
    def decode_requests(self) -> int:
        """Requests that decode one token each in this step."""
        return len(self.decode_context_tokens)

    def decode_only_after(self, steps: int) -> "BatchShape":
        """The same decode batch `steps` steps later: every context is that much longer."""
        return BatchShape(
            decode_context_tokens=self.decode_context_tokens + steps,
            decode_context_tokens_sum=self.decode_context_tokens_sum + steps * self.decode_requests,
        )


class CostModel(Protocol):
    """Maps a batch to the duration of its step. Pure: equal batches cost the same."""

    def step_ms(self, batch: BatchShape) -> float:
        """Duration of one step, in ms, more than 0."""
        ...

    def decode_run_ms(self, batch: BatchShape, steps: int) -> NDArray[np.float64]:
        """Durations of `steps` steps in a row that decode the same requests, `batch` being the first.

        A model may vectorise this, if the results equal those of `step_ms` bit for bit.
        """
        return np.array([self.step_ms(batch.decode_only_after(step)) for step in range(steps)])
