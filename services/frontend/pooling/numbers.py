"""Vectors as numbers, in base64 and as bytes."""

import base64
from collections.abc import Sequence
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from services.frontend.errors import bad_request
from services.frontend.placement.pooler import Vectors
from services.frontend.pooling.schema import EmbedDtype, Endianness

_KINDS: Final[dict[str, Any]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}
"""By vLLM's names."""


def packed(rows: Vectors, embed_dtype: EmbedDtype, endianness: Endianness) -> bytes:
    """All numbers, row by row."""
    with np.errstate(over="ignore"):  # what is beyond the range is infinite, as in vLLM
        values: NDArray[Any] = rows.astype(_KINDS[embed_dtype])
    size = values.dtype.itemsize
    parts: NDArray[np.uint8] = np.frombuffer(values.tobytes(), np.uint8).reshape(-1, size)
    if endianness != "native" and (endianness == "little") != np.little_endian:
        parts = parts[:, ::-1]
    return parts.tobytes()


def in_base64(rows: Vectors, embed_dtype: EmbedDtype, endianness: Endianness) -> str:
    """The same as a text."""
    return base64.b64encode(packed(rows, embed_dtype, endianness)).decode()


def in_bytes(
    rows: Sequence[Vectors], embed_dtype: EmbedDtype, endianness: Endianness, *, is_flat: bool
) -> tuple[bytes, list[dict[str, Any]]]:
    """The vectors of all inputs behind each other, and where each of them is. `is_flat`: an input has one vector."""
    pieces, places, start = [], [], 0
    for index, each in enumerate(rows):
        piece = packed(each, embed_dtype, endianness)
        shape = [each.size] if is_flat else list(each.shape)
        places.append(
            {
                "index": index,
                "embed_dtype": embed_dtype,
                "endianness": endianness,
                "start": start,
                "end": start + len(piece),
                "shape": shape,
            }
        )
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces), places


def in_bits(rows: Sequence[Vectors], *, is_signed: bool) -> list[list[int]]:
    """Cohere's binary form: a bit for each number, set where it is not negative, the first one highest in its byte.
    Raises ApiError (400) for vectors that do not fill their bytes."""
    if any(each.size % 8 for each in rows):
        message = f"Binary embeddings need a number of dimensions that 8 divides; there are {rows[0].size}."
        raise bad_request(message, "embedding_types")
    return [(np.packbits(each.ravel() >= 0).astype(int) - (128 if is_signed else 0)).tolist() for each in rows]
