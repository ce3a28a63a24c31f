"""Control messages and tags."""

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.kv.layout import KvLayout, layout_mismatch
from engine_worker.kv.messages import (
    CONTROL_BYTES,
    KEY_BITS,
    LAST_TRANSFER,
    MAX_DIGESTS,
    MAX_ID_CHARACTERS,
    MAX_PARTS,
    MAX_RUNS,
    PROTOCOL_VERSION,
    Cancel,
    Control,
    Digests,
    Done,
    Failed,
    Grant,
    Hello,
    Introduction,
    Pull,
    Rejection,
    control_tag,
    data_tag,
    decode,
    encode,
)
from engine_worker.kv.plan import Packing
from engine_worker.kv.regions import Part
from mesh.errors import ProtocolViolation

LAYOUT = KvLayout(model="m", dtype="float32", block_tokens=16, region_block_bytes=(4096, 4096), isa="avx512")

uint32 = st.integers(0, 2**32 - 1)
tags = st.tuples(st.integers(0, 2**KEY_BITS - 1), st.integers(0, LAST_TRANSFER))
messages: st.SearchStrategy[Control] = st.one_of(
    st.builds(Introduction, st.integers(0, 9), st.text(max_size=MAX_ID_CHARACTERS), st.binary(max_size=32)),
    st.builds(Rejection, st.text(max_size=50)),
    st.builds(Hello, st.integers(0, 9), st.text(max_size=20), st.just(LAYOUT), st.binary(max_size=32)),
    st.builds(
        Pull,
        uint32,
        st.text(max_size=MAX_ID_CHARACTERS),
        st.lists(st.tuples(uint32, uint32), max_size=50).map(tuple),
        uint32,
        uint32,
        st.builds(Packing, uint32, uint32, uint32),
        st.booleans(),
        st.lists(st.builds(Part, uint32, uint32, uint32), max_size=20).map(tuple),
        st.booleans(),
        st.binary(max_size=32),
    ),
    st.builds(Grant, uint32, uint32),
    st.builds(Cancel, uint32),
    st.builds(Digests, uint32, st.lists(st.integers(0, 2**64 - 1), max_size=50).map(tuple)),
    st.builds(Done, uint32),
    st.builds(Failed, uint32, st.sampled_from(["refused", "failed", "cancelled"]), st.text(max_size=50)),
)


@given(messages, st.binary(max_size=32))
def test_a_message_survives_the_wire_and_what_lies_behind_it(message: Control, rest: bytes) -> None:
    assert decode(bytes(encode(message)) + rest) == message


@given(st.binary(max_size=200))
def test_anything_else_is_a_violation_and_nothing_worse(frame: bytes) -> None:
    try:
        decode(frame)
    except ProtocolViolation:
        return
    assert frame[:4] != bytes(4)  # what could be read was a message


def test_the_largest_messages_fit() -> None:
    run, proof = (2**32 - 1, 2**32 - 1), bytes(32)
    packing = Packing(2**40, 2**40, 2**40)
    longest_id = "\N{GRINNING FACE}" * MAX_ID_CHARACTERS
    parts = (Part(MAX_PARTS, 2**16, 2**16),) * MAX_PARTS
    encode(Pull(LAST_TRANSFER, longest_id, (run,) * MAX_RUNS, 2**32 - 1, 2**40, packing, True, parts, True, proof))
    encode(Digests(LAST_TRANSFER, (2**64 - 1,) * MAX_DIGESTS))


def test_a_message_that_does_not_fit_is_not_sent() -> None:
    with pytest.raises(ProtocolViolation, match="longer than"):
        encode(Failed(1, "failed", "x" * CONTROL_BYTES))


@given(tags, tags)
def test_tags_differ_where_connection_or_transfer_does(one: tuple[int, int], other: tuple[int, int]) -> None:
    assert (data_tag(*one) == data_tag(*other)) == (one == other)
    assert data_tag(*one) < 2**64
    assert control_tag(one[0]) == data_tag(one[0], 0)  # transfers count from 1


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        (LAYOUT, ""),
        (KvLayout("other", "float32", 16, (4096, 4096), "avx512"), "model is 'm' here and 'other' there"),
        (KvLayout("m", "bfloat16", 16, (4096, 4096), "avx512"), "dtype"),
        (KvLayout("m", "float32", 32, (4096, 4096), "avx512"), "block_tokens is 16 here and 32 there"),
        (KvLayout("m", "float32", 16, (4096, 4096), "amx"), "isa"),
        (KvLayout("m", "float32", 16, (4096,), "avx512"), r"2 regions \(layers\) here and 1 there"),
        (KvLayout("m", "float32", 16, (4096, 8192), "avx512"), "8192 bytes here and 12288 there"),
    ],
)
def test_a_mismatch_is_named(theirs: KvLayout, reason: str) -> None:
    found = layout_mismatch(LAYOUT, theirs)
    assert re.search(reason, found) if reason else found == ""


def test_messages_without_the_newer_fields_are_understood() -> None:
    layout = {"model": "m", "dtype": "float32", "block_tokens": 16, "region_block_bytes": [4096], "isa": ""}
    hello = {"type": "hello", "protocol": PROTOCOL_VERSION, "agent_id": "a", "layout": layout}
    pull = {
        "type": "pull",
        "transfer": 1,
        "export_id": "e",
        "runs": [[3, 2]],
        "granted": 0,
        "deadline_ms": 500,
        "packing": msgspec.to_builtins(Packing(1, 2, 3)),
        "checksums": False,
    }
    assert decode(_framed(hello)) == Hello(PROTOCOL_VERSION, "a", KvLayout("m", "float32", 16, (4096,)))
    ours = Pull(1, "e", ((3, 2),), 0, 500, Packing(1, 2, 3), False)
    assert decode(_framed(pull)) == ours, "what it does not know is as if it were not there"
    assert pull.items() <= msgspec.msgpack.decode(encode(ours)[4:]).items(), "and it ignores what is there besides"


def _framed(message: dict[str, object]) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body
