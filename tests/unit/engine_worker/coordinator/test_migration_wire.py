"""What crosses the wire comes out as it went in."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.request import EngineRequest, SamplingParams
from controlplane.protocols.migration.messages import (
    Abort,
    Accept,
    Committed,
    Failed,
    FinalMessage,
    Offer,
    Pulled,
    Refuse,
    Round,
    ToSource,
)
from engine_worker.coordinator import wire
from mesh.errors import ProtocolViolation
from penstock.v1 import migration_pb2

ids = st.text(min_size=1, max_size=20)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=8).map(tuple)
doubles = st.floats(allow_nan=False, allow_infinity=False)
sampling = st.builds(
    SamplingParams,
    max_tokens=st.integers(0, 2**32 - 1),
    min_tokens=st.integers(0, 2**32 - 1),
    temperature=doubles,
    top_p=doubles,
    top_k=st.integers(0, 2**32 - 1),
    min_p=doubles,
    presence_penalty=doubles,
    frequency_penalty=doubles,
    repetition_penalty=doubles,
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop_token_ids=tokens,
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    logit_bias=st.dictionaries(st.integers(0, 2**32 - 1), doubles, max_size=3).map(
        lambda bias: tuple(sorted(bias.items()))
    ),
)
requests = st.builds(
    EngineRequest, ids, tokens, sampling, emitted_token_ids=tokens, priority=st.integers(-(2**31), 2**31 - 1)
)


@given(
    st.builds(Offer, ids, requests, st.integers(1, 2**32 - 1), ids),
    st.integers(0, 2**32 - 1),
    st.none() | st.integers(1, 2**32 - 1),
    st.none() | st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 2**32 - 1)),
)
def test_an_offer(offer: Offer, deadline_ms: int, predicted: int | None, band: tuple[int, int] | None) -> None:
    message = wire.offer_message(offer, "m", deadline_ms, "token", predicted, band)
    assert message.offer.predicted_end_tokens == (predicted or 0)
    assert (message.offer.predicted_low_end_tokens, message.offer.predicted_high_end_tokens) == (band or (0, 0))
    assert wire.offer_of(message.offer) == offer
    assert (message.offer.request.model, message.offer.request.deadline_ms) == ("m", deadline_ms)


@given(st.builds(Round, ids, st.integers(1, 99), st.integers(0, 2**31), st.just(0)), tokens, tokens)
def test_a_round(message: Round, block_ids: tuple[int, ...], emitted: tuple[int, ...]) -> None:
    message = replace(message, block_count=len(block_ids))
    sent = wire.source_message(message, block_ids, emitted)
    assert wire.to_target(sent) == message
    assert tuple(sent.round.block_ids) == block_ids
    assert tuple(sent.round.emitted_token_ids) == emitted


@given(st.builds(FinalMessage, ids, tokens, st.integers(0, 2**31), st.integers(0, 2**31), st.just(0)), tokens)
def test_a_final_message(message: FinalMessage, block_ids: tuple[int, ...]) -> None:
    message = replace(message, block_count=len(block_ids))
    assert wire.to_target(wire.source_message(message, block_ids, ())) == message


def test_an_abort() -> None:
    message = Abort("m", "why")
    assert wire.to_target(wire.source_message(message, (), ())) == message


@pytest.mark.parametrize(
    "message", [Accept("m"), Refuse("m", "full"), Pulled("m", 3), Committed("m"), Failed("m", "torn")]
)
def test_answers(message: ToSource) -> None:
    assert wire.to_source(wire.target_message(message)) == message


def test_what_is_no_migration_message_is_a_violation() -> None:
    with pytest.raises(ProtocolViolation):
        wire.to_source(wire.target_hello("a", "1"))
    with pytest.raises(ProtocolViolation):
        wire.to_target(migration_pb2.SourceMessage())
