"""Vectors in base64, as bytes and as bits."""

import struct

import numpy as np
import pytest

from services.frontend.errors import ApiError
from services.frontend.pooling.numbers import in_bits, in_bytes, packed

ROWS = np.array([[1.0, -0.5, 0.1]], dtype=np.float32)


@pytest.mark.parametrize(
    ("embed_dtype", "little"),
    [
        ("float32", "0000803f 000000bf cdcccc3d"),
        ("float16", "003c 00b8 662e"),
        ("bfloat16", "803f 00bf cd3d"),  # 0.1 is rounded up
        ("fp8_e4m3", "38 b0 1d"),
        ("fp8_e5m2", "3c b8 2e"),
    ],
)
def test_numbers_are_written_in_every_form(embed_dtype: str, little: str) -> None:
    numbers = [bytes.fromhex(number) for number in little.split()]
    assert packed(ROWS, embed_dtype, "little") == b"".join(numbers)  # type: ignore[arg-type]
    assert packed(ROWS, embed_dtype, "big") == b"".join(number[::-1] for number in numbers)  # type: ignore[arg-type]


def test_what_is_beyond_the_range_of_a_form_is_no_number() -> None:
    assert packed(np.array([[1e6]], dtype=np.float32), "fp8_e4m3", "native") == b"\x7f"
    assert packed(np.array([[1e6]], dtype=np.float32), "float16", "little") == struct.pack("<e", np.inf)


def test_bytes_say_where_each_input_is() -> None:
    tokens = np.zeros((2, 3), dtype=np.float32)
    content, places = in_bytes([tokens, ROWS], "float16", "native", is_flat=False)
    assert len(content) == 18
    assert [(each["index"], each["start"], each["end"], each["shape"]) for each in places] == [
        (0, 0, 12, [2, 3]),
        (1, 12, 18, [1, 3]),
    ]
    _, (place,) = in_bytes([ROWS], "float32", "big", is_flat=True)
    assert place == {
        "index": 0,
        "embed_dtype": "float32",
        "endianness": "big",
        "start": 0,
        "end": 12,
        "shape": [3],
    }


def test_a_bit_is_set_where_a_number_is_not_negative() -> None:
    vector = np.array([[0.0, -1, -1, -1, -1, -1, -1, 1]], dtype=np.float32)
    assert in_bits([vector], is_signed=False) == [[0b1000_0001]]
    assert in_bits([vector], is_signed=True) == [[0b1000_0001 - 128]]
    with pytest.raises(ApiError, match="8 divides"):
        in_bits([ROWS], is_signed=True)
