"""Control messages and tags."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.kv.layout import KvLayout, layout_mismatch
from engine_worker.kv.messages import (
    CONTROL_BYTES,
    LAST_TRANSFER,
    MAX_DIGESTS,
    MAX_ID_CHARACTERS,
    MAX_RUNS,
    Cancel,
    Control,
    Digests,
    Done,
    Failed,
    Grant,
    Hello,
    Pull,
    control_tag,
    data_tag,
    decode,
    encode,
)
from engine_worker.kv.plan import Packing
from mesh.errors import ProtocolViolation

LAYOUT = KvLayout(model="m", dtype="float32", block_tokens=16, region_block_bytes=(4096, 4096), isa="avx512")

uint32 = st.integers(0, LAST_TRANSFER)
messages: st.SearchStrategy[Control] = st.one_of(
    st.builds(Hello, st.integers(0, 9), st.text(max_size=20), st.just(LAYOUT)),
    st.builds(
        Pull,
        uint32,
        st.text(max_size=MAX_ID_CHARACTERS),
        st.lists(st.tuples(uint32, uint32), max_size=50).map(tuple),
        uint32,
        uint32,
        st.builds(Packing, uint32, uint32, uint32),
        st.booleans(),
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
    run = (LAST_TRANSFER, LAST_TRANSFER)
    packing = Packing(2**40, 2**40, 2**40)
    longest_id = "\N{GRINNING FACE}" * MAX_ID_CHARACTERS
    encode(Pull(LAST_TRANSFER, longest_id, (run,) * MAX_RUNS, LAST_TRANSFER, 2**40, packing, True))
    encode(Digests(LAST_TRANSFER, (2**64 - 1,) * MAX_DIGESTS))


def test_a_message_that_does_not_fit_is_not_sent() -> None:
    with pytest.raises(ProtocolViolation, match="longer than"):
        encode(Failed(1, "failed", "x" * CONTROL_BYTES))


@given(st.tuples(st.integers(1, LAST_TRANSFER), uint32), st.tuples(st.integers(1, LAST_TRANSFER), uint32))
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
