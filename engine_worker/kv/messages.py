"""What two agents say to each other, and the tags under which it travels.

    caller                                       callee
    Introduction (which transfer, a proof) ----> checks it (`tokens`) before it says anything of its own
           <--------------------------- Hello with a proof, or Rejection with the reason, and the end
    Hello ------------------------------------->

    puller                                       source
    Pull (runs of blocks, messages granted) ---> checks the export and the proof
           <--------------------------- data, as many messages as were granted
    Grant (more) ------------------------------>
           <--------------------------- data ...
           <--------------------------- Done, or Failed with the reason
    Cancel (at any time, and after Failed) ---->
    Beat, both ways, as long as either side has a transfer on the connection

Two rules keep every connection usable after a transfer that failed. The puller posts the receive of a message
before it grants it, and the source sends every message that was granted, an empty one if it has given up; so
nothing is left behind at either side. Every Pull is answered by one Done or Failed, and a Failed by a Cancel, before
which Grants may still be under way. Where a peer does not keep to that, because it hangs, the connection is cut, and
tags of a connection are never used again.
"""

from typing import Literal, TypeAlias

import msgspec

from engine_worker.kv.layout import KvLayout
from engine_worker.kv.plan import Packing
from engine_worker.kv.regions import Part
from mesh.errors import ProtocolViolation

PROTOCOL_VERSION = 3
"""Another number ends all transfers between the former release and this one, so it changes only where one side would
misread the other. New fields need none: they have defaults that say what a side meant that does not know them."""
CONTROL_BYTES = 64 * 1024
"""Largest control message, and the size of the buffer that awaits the next one."""
MAX_RUNS = 4096
"""In one Pull: at most 12 bytes each."""
MAX_PARTS = 1024
"""In one Pull: at most 10 bytes each."""
MAX_DIGESTS = 4096
"""In one message: at most 9 bytes each."""
MAX_ID_CHARACTERS = 256
TRANSFER_BITS = 20
LAST_TRANSFER = 2**TRANSFER_BITS - 1
"""Of a connection; then they are counted from 1 again."""
KEY_BITS = 64 - TRANSFER_BITS
"""Of the key of a connection, which is drawn: UCX matches tags of all its connections alike, and who can guess a key
puts messages into another's transfer."""


class Introduction(msgspec.Struct, frozen=True, tag="introduction"):
    """The first message, of whoever has connected."""

    protocol: int
    export_id: str
    """A transfer that it was told of."""
    proof: bytes
    """See `tokens.Purpose.CONNECT`."""


class Rejection(msgspec.Struct, frozen=True, tag="rejection"):
    """Answers an `Introduction`; the caller hangs up."""

    reason: str


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Of each side to one that has shown who it is: its protocol version, identity and KV layout."""

    protocol: int
    agent_id: str
    layout: KvLayout
    proof: bytes = b""
    """The callee's, see `tokens.Purpose.ACCEPT`."""


class Pull(msgspec.Struct, frozen=True, tag="pull"):
    """Puller to source: send the blocks of `runs` that were exported as `export_id`."""

    transfer: int
    """Counts from 1 on each connection."""
    export_id: str
    runs: tuple[tuple[int, int], ...]
    """First source block and number of blocks of each."""
    granted: int
    """Messages whose receives are posted."""
    deadline_ms: int
    packing: Packing
    checksums: bool
    parts: tuple[Part, ...] = ()
    """Of the source's regions, in this order; empty for all of each."""
    is_copied: bool = False
    """Send copies, which the checksums are of: behind the last token a block may be written to meanwhile."""
    proof: bytes = b""
    """Of `export_id` and `transfer`; see `tokens.Purpose.PULL`."""


class Grant(msgspec.Struct, frozen=True, tag="grant"):
    """Puller to source: the number of messages that may be sent in all, earlier grants included."""

    transfer: int
    granted: int


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The puller wants no more of it, or has heard that it gets no more. Nothing follows."""

    transfer: int


class Digests(msgspec.Struct, frozen=True, tag="digests"):
    """xxh3 of the next messages, in order."""

    transfer: int
    values: tuple[int, ...]


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Source to puller: all messages of the transfer were sent."""

    transfer: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Source to puller: the transfer ends here, and why."""

    transfer: int
    kind: Literal["refused", "failed", "cancelled"]
    """Before the first block, midway, or because the puller wanted no more."""
    reason: str = ""


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """I live, and a transfer is under way."""


Control: TypeAlias = Introduction | Rejection | Hello | Pull | Grant | Cancel | Digests | Done | Failed | Beat

_LENGTH_BYTES = 4
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)


def encode(message: Control) -> bytearray:
    """Length, then the message. Raises `ProtocolViolation` if it is too long."""
    frame = bytearray(_LENGTH_BYTES)
    _encoder.encode_into(message, frame, _LENGTH_BYTES)
    if len(frame) > CONTROL_BYTES:
        raise ProtocolViolation(
            f"a {type(message).__name__} of {len(frame)} bytes is longer than {CONTROL_BYTES}; name fewer blocks"
        )
    frame[:_LENGTH_BYTES] = (len(frame) - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "little")
    return frame


def decode(frame: bytes | memoryview) -> Control:
    """Of a frame that may be longer than its message. Raises `ProtocolViolation` for anything else."""
    length = int.from_bytes(frame[:_LENGTH_BYTES], "little")
    if not 0 < length <= len(frame) - _LENGTH_BYTES:
        raise ProtocolViolation(f"a KV control message says it has {length} bytes in a frame of {len(frame)}")
    try:
        return _decoder.decode(memoryview(frame)[_LENGTH_BYTES : _LENGTH_BYTES + length])
    except msgspec.MsgspecError as error:
        raise ProtocolViolation(
            f"a KV control message cannot be read: {error}; do both sides run one version?"
        ) from error


def control_tag(key: int) -> int:
    """Of control messages to the side that chose this key for the connection."""
    return key << TRANSFER_BITS


def data_tag(key: int, transfer: int) -> int:
    """Of the blocks of a transfer to the side that chose this key."""
    return key << TRANSFER_BITS | transfer
