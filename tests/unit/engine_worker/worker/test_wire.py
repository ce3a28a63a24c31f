from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given

from controlplane.load_message import load_message
from controlplane.model.adapter import Adapter
from controlplane.model.instance import InstanceState, KvBlocks, LoadReport
from controlplane.model.request import (
    EngineRequest,
    FinishReason,
    PositionLogprobs,
    Resume,
    SamplingParams,
    StepOutput,
    TokenDelta,
    TokenLogprob,
)
from engine_worker import wire
from engine_worker.deltas import Delta, Failure, FailureCode
from penstock.v1 import request_pb2, worker_pb2

TOKEN = st.integers(0, 2**32 - 1)
LOGPROB = st.builds(TokenLogprob, TOKEN, st.floats(-100, 0, width=32))
POSITION = st.builds(PositionLogprobs, LOGPROB, st.lists(LOGPROB, max_size=3).map(tuple))
DELTA = st.builds(
    TokenDelta,
    request_id=st.text(min_size=1, max_size=8),
    offset=TOKEN,
    token_ids=st.lists(TOKEN, max_size=4).map(tuple),
    logprobs=st.lists(POSITION, max_size=2).map(tuple),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    error=st.text(max_size=10),
    cached_tokens=st.none() | TOKEN,
)
FAILURE = st.builds(Failure, st.text(min_size=1), TOKEN, st.sampled_from(FailureCode), st.text())


def read_back(message: request_pb2.TokenDelta) -> Delta:
    """What a frontend understands."""
    reason = request_pb2.FinishReason.Name(message.finish_reason).removeprefix("FINISH_REASON_").lower()
    code = request_pb2.ErrorCode.Name(message.error.code).removeprefix("ERROR_CODE_").lower()
    if message.HasField("error") and code != "engine":
        return Failure(message.request_id, message.offset, FailureCode(code), message.error.message)
    return TokenDelta(
        message.request_id,
        message.offset,
        tuple(message.token_ids),
        tuple(
            PositionLogprobs(
                TokenLogprob(position.chosen.token_id, position.chosen.logprob),
                tuple(TokenLogprob(top.token_id, top.logprob) for top in position.top),
            )
            for position in message.logprobs
        ),
        None if reason == "unspecified" else FinishReason(reason),
        message.error.message,
        message.cached_tokens if message.HasField("cached_tokens") else None,
    )


@given(st.lists(DELTA | FAILURE, max_size=5))
def test_a_step_survives_the_wire(deltas: list[Delta]) -> None:
    message = worker_pb2.WorkerMessage.FromString(wire.step_message(deltas, {}).SerializeToString())
    assert message.WhichOneof("message") == "step"
    for sent, got in zip(deltas, map(read_back, message.step.deltas), strict=True):
        if isinstance(sent, Failure):
            code = FailureCode.ENGINE if isinstance(got, TokenDelta) else got.code
            message_ = got.error if isinstance(got, TokenDelta) else got.message
            assert (sent.request_id, sent.offset, sent.code, sent.message) == (
                got.request_id,
                got.offset,
                code,
                message_,
            )
            assert isinstance(got, Failure) or got.finish_reason is FinishReason.ERROR
            continue
        assert isinstance(got, TokenDelta)
        assert got.error == (sent.error if sent.finish_reason is FinishReason.ERROR else "")
        assert (got.request_id, got.offset, got.token_ids) == (sent.request_id, sent.offset, sent.token_ids)
        assert (got.logprobs, got.finish_reason) == (sent.logprobs, sent.finish_reason)
        assert got.cached_tokens == sent.cached_tokens


def test_an_error_that_is_this_instance_s_alone_may_go_elsewhere() -> None:
    error = TokenDelta("a", 0, (), finish_reason=FinishReason.ERROR, error="no adapter")
    codes = [
        wire.step_message([replace(error, may_go_elsewhere=may)], {}).step.deltas[0].error.code for may in (False, True)
    ]
    assert codes == [request_pb2.ERROR_CODE_ENGINE, request_pb2.ERROR_CODE_UNAVAILABLE]


def test_a_request_keeps_its_adapter() -> None:
    request = EngineRequest(
        "a", (1,), SamplingParams(9), adapter=Adapter("poet", "d1", "/poet", is_3d_lora_weight=True)
    )
    message = wire.generate_message(request, model="m", deadline_ms=0, epoch=0)
    assert wire.engine_request(message) == request
    plain = replace(request, adapter=None)
    assert wire.engine_request(wire.generate_message(plain, model="m", deadline_ms=0, epoch=0)) == plain


def test_every_delta_bears_its_epoch() -> None:
    deltas = (TokenDelta("a", 0, (1,)), Failure("b", 3, FailureCode.UNAVAILABLE, "full"), TokenDelta("c", 0, (1,)))
    step = wire.step_message(deltas, {"a": 2, "b": 4}).step
    assert [delta.epoch for delta in step.deltas] == [2, 4, 0]


def test_a_request_arrives_as_it_was_sent() -> None:
    message = request_pb2.GenerateRequest(
        request_id="a",
        prompt_token_ids=[1, 2, 3],
        emitted_token_ids=[4],
        priority=-2,
        sampling=request_pb2.SamplingParams(
            max_tokens=9,
            min_tokens=1,
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.1,
            presence_penalty=0.2,
            frequency_penalty=0.3,
            repetition_penalty=1.1,
            seed=0,
            stop_token_ids=[2],
            ignore_eos=True,
            logprobs=0,
            logit_bias={5: 1.5, 3: -2.0},
        ),
    )
    request = wire.engine_request(message)
    assert (request.prompt_token_ids, request.emitted_token_ids, request.priority) == ((1, 2, 3), (4,), -2)
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.top_k) == (9, 1, 40)
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.5, 0.9, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.2, 0.3, 1.1)
    assert (sampling.seed, sampling.logprobs) == (0, 0), "0 is a value, absence is None"
    assert (sampling.stop_token_ids, sampling.ignore_eos) == ((2,), True)
    assert sampling.logit_bias == ((3, -2.0), (5, 1.5))


def test_an_absent_seed_and_absent_logprobs_are_none() -> None:
    sampling = wire.engine_request(request_pb2.GenerateRequest()).sampling
    assert (sampling.seed, sampling.logprobs) == (None, None)


def test_a_load_report_carries_every_field() -> None:
    load = LoadReport(1, 2, 3, 4, 5, 6, 7, 8, 9.5, 10)
    message = load_message(load, InstanceState.DRAINING, ["a", "b"], ["c"])
    others = ("state", "admitted_request_ids", "ended_request_ids")
    values = [value for field, value in message.ListFields() if field.name not in others]
    assert values == [1, 2, 3, 4, 5, 6, 7, 8, 9.5, 10]
    assert message.state == worker_pb2.INSTANCE_STATE_DRAINING
    assert list(message.admitted_request_ids) == ["a", "b"]
    assert list(message.ended_request_ids) == ["c"]


def test_block_hashes_keep_all_64_bits() -> None:
    message = wire.kv_update_message(KvBlocks(stored=(2**64 - 1,), removed=(1,), cleared=True))
    assert (list(message.stored), list(message.removed), message.cleared) == ([2**64 - 1], [1], True)


def test_an_empty_step_is_still_a_step() -> None:
    assert wire.step_message(StepOutput().deltas, {}).WhichOneof("message") == "step"


def test_a_request_that_goes_to_another_process_is_the_same_there() -> None:
    request = EngineRequest(
        "r-1",
        (1, 2),
        SamplingParams(max_tokens=9, seed=4, stop_token_ids=(5,), logit_bias=((3, 0.5),)),
        emitted_token_ids=(6,),
        priority=-1,
        resume=Resume("r", b"ticket"),
    )
    message = wire.generate_message(request, model="m", deadline_ms=5, epoch=3)
    assert wire.engine_request(message) == request
    plain = replace(request, resume=None)
    assert wire.engine_request(wire.generate_message(plain, model="m", deadline_ms=0, epoch=0)) == plain
