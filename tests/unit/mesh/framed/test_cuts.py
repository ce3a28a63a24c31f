"""Whatever a connection does to the bytes of a stream, its reader gets a beginning of what was written, in order."""

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.rpc.framed.frames import FrameKind, encode
from mesh.rpc.framed.stream import FramedStream

pytestmark = pytest.mark.live

MESSAGES = st.lists(st.binary(max_size=200), max_size=12)
PLACES = st.lists(st.integers(min_value=0), max_size=8)


class _Socket(asyncio.Transport):
    """Nobody is at its other end."""

    def write(self, data: object) -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass


async def _read(pieces: list[bytes], *, is_aborted: bool) -> tuple[list[bytes], list[str]]:
    """What a stream brings that gets these pieces and then ends; and why it says that it ended."""
    lost: list[str] = []
    stream = FramedStream(lambda kind, payload: None, lost.append)
    stream.connection_made(_Socket())
    stream.takes_messages = True
    for piece in pieces:
        stream.data_received(piece)
    stream.connection_lost(ConnectionResetError("cut") if is_aborted else None)
    read = []
    while (message := await stream.read()) is not None:
        read.append(message)
    return read, lost


def _pieces(data: bytes, places: list[int]) -> list[bytes]:
    cuts = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[start:end] for start, end in pairwise(cuts)]


@given(MESSAGES, PLACES, st.integers(min_value=0), st.booleans())
def test_a_stream_that_is_cut_anywhere_brings_whole_messages_from_the_first(
    messages: list[bytes], places: list[int], cut: int, is_aborted: bool
) -> None:
    frames = [encode(FrameKind.MESSAGE, message) for message in messages]
    data = b"".join(frames)
    kept = cut % (len(data) + 1)
    read, lost = asyncio.run(_read(_pieces(data[:kept], places), is_aborted=is_aborted))
    whole = next(
        (count for count in range(len(frames)) if sum(map(len, frames[: count + 1])) > kept),
        len(frames),
    )
    assert read == messages[:whole]
    assert len(lost) == 1


@given(MESSAGES, PLACES, st.binary(min_size=1, max_size=40), st.integers(min_value=0))
def test_garbage_in_a_stream_ends_it_and_invents_no_message_before_it(
    messages: list[bytes], places: list[int], garbage: bytes, at: int
) -> None:
    frames = [encode(FrameKind.MESSAGE, message) for message in messages]
    before = at % (len(frames) + 1)
    # a length of 2 GiB and more: no frame of ours begins so
    data = b"".join(frames[:before]) + b"\xff" + garbage.ljust(4, b"\xff") + b"".join(frames[before:])
    read, lost = asyncio.run(_read(_pieces(data, places), is_aborted=False))
    assert len(lost) == 1
    assert "bytes is announced" in lost[0] or "no kind of frame" in lost[0]
    assert read == messages[: len(read)]
    assert len(read) <= before
