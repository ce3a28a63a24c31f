"""What a length predictor is shown of a request, besides or instead of its hidden state."""

from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

Inputs = Literal["state", "state+counts", "counts"]
INPUTS: Final[tuple[Inputs, ...]] = ("state", "state+counts", "counts")
"""state: the hidden state alone, equation (2) of STAR. state+counts: with the logarithms of the prompt's length and of
the number of generated tokens behind it, which the worker knows anyway. counts: those two alone, to compare with."""

_COUNTS: Final = 2


def input_width(inputs: Inputs, hidden_size: int) -> int:
    """Width of a feature vector."""
    return (0 if inputs == "counts" else hidden_size) + (0 if inputs == "state" else _COUNTS)


def features(
    inputs: Inputs,
    states: NDArray[np.float32],
    prompt_tokens: Sequence[int] | NDArray[np.int32],
    generated_tokens: Sequence[int] | NDArray[np.int32],
) -> NDArray[np.float32]:
    """One row per request: requests x `input_width`."""
    if inputs == "state":
        return states
    counts = np.log1p(np.stack([prompt_tokens, generated_tokens], axis=1).astype(np.float32))
    return counts if inputs == "counts" else np.concatenate([states, counts], axis=1)
