"""Vectors and scores of a simulated pooling model: pseudo-random, and the same for the same tokens everywhere. Pure."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine_worker.engines.pooling import PoolingParameters
from simulator.instance.splitmix import splitmix_words

_CLASS_STREAM: Final = 1 << 40
"""Behind every token id: what scores are made of."""


def pooled(token_ids: Sequence[int], parameters: PoolingParameters, dimensions: int) -> NDArray[np.float32]:
    """One vector, or one for each token with `token_embed`. Each token has its own random one and the prompt their
    sum, so that prompts that share many tokens are similar. `classify` gives one score from 0 to 1."""
    tokens = np.array(token_ids, dtype=np.uint64)
    if parameters.task == "classify":
        share = _uniform(tokens + np.uint64(_CLASS_STREAM), 1).mean(dtype=np.float64)
        return np.array([share], dtype=np.float32)
    vectors = (_uniform(tokens, dimensions) - 0.5)[:, : parameters.dimensions or dimensions]
    rows = vectors if parameters.task == "token_embed" else vectors.sum(axis=0, keepdims=True)
    if parameters.use_activation is not False:
        rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    found: NDArray[np.float32] = rows.astype(np.float32)
    return found if parameters.task == "token_embed" else found[0]


def _uniform(keys: NDArray[np.uint64], columns: int) -> NDArray[np.float64]:
    """From 0 to 1, one row for each key."""
    words = splitmix_words(keys[:, None] << np.uint64(20), np.arange(columns, dtype=np.uint64)[None, :])
    return words.astype(np.float64) / 2.0**64
