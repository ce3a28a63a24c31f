"""What a length predictor learns from: hidden states with the number of tokens that were still to come."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

Split = Literal["train", "validation", "test"]
SPLITS: Final[tuple[Split, ...]] = ("train", "validation", "test")

_BUCKETS: Final = 20
_TRAIN_BUCKETS: Final = 14
_VALIDATION_BUCKETS: Final = 3


@dataclass(frozen=True, slots=True)
class LengthSamples:
    """Samples of many requests, in columns of one length.

    Sample i was taken when request `requests[i]` had generated `generated_tokens[i]` tokens (0: at the end of its
    prompt); `remaining_tokens[i]` were still to come, the end of sequence included.
    """

    states: NDArray[np.float32]
    """samples x hidden size: last layer, last token (STAR, section 4.2)."""
    prompt_tokens: NDArray[np.int32]
    generated_tokens: NDArray[np.int32]
    remaining_tokens: NDArray[np.int32]
    requests: NDArray[np.int32]
    """Number of the request that a sample belongs to."""

    def __post_init__(self) -> None:
        if self.states.ndim != 2 or any(len(column) != len(self.states) for column in self._counts()):
            raise ValueError(
                f"{[column.shape for column in (self.states, *self._counts())]} are no columns of one length"
            )

    def __len__(self) -> int:
        return len(self.states)

    def only(self, kept: NDArray[np.bool_]) -> "LengthSamples":
        """The samples marked in `kept`."""
        return LengthSamples(self.states[kept], *(column[kept] for column in self._counts()))

    def _counts(self) -> tuple[NDArray[np.int32], ...]:
        return self.prompt_tokens, self.generated_tokens, self.remaining_tokens, self.requests


def joined(parts: Sequence[LengthSamples]) -> LengthSamples:
    """All samples of at least one part, in order."""
    return LengthSamples(
        np.concatenate([part.states for part in parts]),
        *(np.concatenate(columns) for columns in zip(*(part._counts() for part in parts), strict=True)),
    )


def split_of(prompt_token_ids: Sequence[int], seed: int = 0) -> Split:
    """The split that a request belongs to: 70 % train, 15 % validation, 15 % test (STAR, section 4.4).

    All samples of a request fall into one split, and so do requests of the same prompt, which would otherwise be seen
    in training and asked for in the test.
    """
    text = f"{seed}/{' '.join(map(str, prompt_token_ids))}"
    bucket = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % _BUCKETS
    if bucket < _TRAIN_BUCKETS:
        return "train"
    return "validation" if bucket < _TRAIN_BUCKETS + _VALIDATION_BUCKETS else "test"
