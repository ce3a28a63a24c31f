"""A counter-based random stream: word i of stream `key` costs the same whichever words were read before.

SplitMix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014): the output
function applied to key + (i + 1) x gamma.
"""

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def splitmix_words(keys: NDArray[np.uint64], indices: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Word `indices` of the streams `keys`; the two broadcast against each other."""
    words = keys + (indices + np.uint64(1)) * _GAMMA
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = words ^ (words >> np.uint64(31))
    return mixed


def stream_words(key: int, first: int, count: int) -> NDArray[np.uint64]:
    """Words first .. first + count - 1 of one stream."""
    return splitmix_words(np.array([key], dtype=np.uint64), np.arange(first, first + count, dtype=np.uint64))
