"""Frames come out as they went in, however the socket splits them; what is no frame is refused."""

import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import ProtocolViolation
from mesh.rpc.framed.frames import HEADER_BYTES, KINDS, FrameKind, FrameReader, encode

FRAMES = st.lists(st.tuples(st.sampled_from(KINDS), st.binary(max_size=300)), max_size=12)


def fed(reader: FrameReader, data: bytes, cuts: list[int]) -> list[tuple[FrameKind, bytes]]:
    """What a reader makes of data that comes in pieces."""
    places = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    return [frame for start, end in pairwise(places) for frame in reader.feed(data[start:end])]


@given(FRAMES, st.lists(st.integers(min_value=0), max_size=20))
def test_frames_survive_any_split(frames: list[tuple[FrameKind, bytes]], cuts: list[int]) -> None:
    data = b"".join(encode(*frame) for frame in frames)
    assert fed(FrameReader(), data, cuts) == frames


@given(FRAMES)
def test_a_byte_at_a_time(frames: list[tuple[FrameKind, bytes]]) -> None:
    data = b"".join(encode(*frame) for frame in frames)
    reader = FrameReader()
    assert [frame for byte in data for frame in reader.feed(bytes([byte]))] == frames


@given(st.binary(max_size=2000), st.lists(st.integers(min_value=0), max_size=20))
def test_garbage_is_frames_within_bounds_or_refused(data: bytes, cuts: list[int]) -> None:
    reader = FrameReader(max_payload_bytes=64)
    try:
        frames = fed(reader, data, cuts)
    except ProtocolViolation:
        return
    assert all(len(payload) <= 64 for _, payload in frames)
    assert data.startswith(b"".join(encode(*frame) for frame in frames))


@given(FRAMES, st.integers(len(KINDS), 255), st.binary(max_size=20))
def test_an_unknown_kind_is_refused(frames: list[tuple[FrameKind, bytes]], kind: int, payload: bytes) -> None:
    data = b"".join(encode(*frame) for frame in frames) + struct.pack("!IB", len(payload), kind) + payload
    with pytest.raises(ProtocolViolation, match=f"{kind} is no kind of frame"):
        FrameReader().feed(data)


def test_a_large_frame_is_refused_by_its_header_alone() -> None:
    reader = FrameReader(max_payload_bytes=100)
    assert reader.feed(encode(FrameKind.MESSAGE, bytes(100))) == [(FrameKind.MESSAGE, bytes(100))]
    with pytest.raises(ProtocolViolation, match="101 bytes is announced, 100 are taken"):
        reader.feed(encode(FrameKind.MESSAGE, bytes(101))[:HEADER_BYTES])


@given(st.integers(1, 40), st.integers(1, 5000))
def test_a_large_frame_in_many_pieces_is_looked_at_when_it_is_complete(pieces: int, size: int) -> None:
    data = encode(FrameKind.MESSAGE, bytes(size))
    reader = FrameReader()
    step = max(1, len(data) // pieces)
    seen = [reader.feed(data[start : start + step]) for start in range(0, len(data), step)]
    assert seen[-1] == [(FrameKind.MESSAGE, bytes(size))]
    assert not any(seen[:-1])
