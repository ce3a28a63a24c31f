"""Frames: how messages lie one behind the other on a socket. Pure.

A frame is its payload's length (4 bytes, big endian), its kind (1 byte) and the payload.
"""

import struct
from enum import IntEnum
from typing import Final

from mesh.errors import ProtocolViolation
from mesh.rpc.limits import MAX_MESSAGE_BYTES

HEADER: Final = struct.Struct("!IB")
HEADER_BYTES: Final = HEADER.size


class FrameKind(IntEnum):
    """What a frame is. The messages named here are those of frames.proto."""

    MESSAGE = 0
    """A message of the method that was called."""
    CALL = 1
    """The caller's first: `FramedCall`."""
    ACCEPT = 2
    """The answer to it: `FramedAccept`."""
    HALF_CLOSE = 3
    """The caller sends no more messages."""
    STATUS = 4
    """The end of the answer: `FramedStatus`."""
    WINDOW = 5
    """So many bytes of messages have been read (8 bytes, big endian)."""
    PING = 6
    PONG = 7


KINDS: Final = tuple(FrameKind)
Frame = tuple[FrameKind, bytes]


def encode(kind: FrameKind, payload: bytes = b"") -> bytes:
    """One frame."""
    return HEADER.pack(len(payload), kind) + payload


class FrameReader:
    """Cuts what a socket brings into frames, wherever it was split on its way."""

    def __init__(self, max_payload_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._max_payload_bytes = max_payload_bytes
        self._rest = bytearray()
        """The beginning of a frame whose end has not come."""
        self._wanted_bytes = 0
        """How long `_rest` must be before it is worth looking at again."""

    @property
    def has_begun(self) -> bool:
        """Whether a frame has begun whose end has not come."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete now. Raises ProtocolViolation for what is no frame; nothing can be read after
        that."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted_bytes:
                return []
            data = bytes(self._rest)
            self._rest.clear()
        frames: list[Frame] = []
        start, end = 0, len(data)
        self._wanted_bytes = HEADER_BYTES
        while end - start >= HEADER_BYTES:
            size_bytes, number = HEADER.unpack_from(data, start)
            if number >= len(KINDS):
                raise ProtocolViolation(
                    f"{number} is no kind of frame; is this another release, or no process of ours?"
                )
            if size_bytes > self._max_payload_bytes:
                raise ProtocolViolation(
                    f"a frame of {size_bytes} bytes is announced, {self._max_payload_bytes} are taken at most"
                )
            after = start + HEADER_BYTES + size_bytes
            if after > end:
                self._wanted_bytes = HEADER_BYTES + size_bytes
                break
            frames.append((KINDS[number], data[start + HEADER_BYTES : after]))
            start = after
        if start < end:
            self._rest += data[start:] if start else data
        return frames
