"""A request's time at a worker, as spans."""

from controlplane.model.request import EngineRequest, FinishReason, SamplingParams, StepOutput, TokenDelta
from engine_worker import request_spans
from engine_worker.request_spans import RequestSpans
from mesh.tracing import Tracer
from tests.unit.mesh.test_tracing import PARENT, UNSAMPLED, Chance, Recorded, SetClock


def spans_into(recorded: Recorded) -> RequestSpans:
    return RequestSpans(Tracer(recorded, SetClock(), Chance()), "worker-0")


def asked(request_id: str = "r", traceparent: str = PARENT) -> EngineRequest:
    return EngineRequest(request_id, (1, 2, 3), SamplingParams(max_tokens=9), traceparent=traceparent)


def delta(offset: int, *token_ids: int, finish: FinishReason | None = None, cached: int | None = None) -> StepOutput:
    return StepOutput((TokenDelta("r", offset, token_ids, finish_reason=finish, cached_tokens=cached),))


def test_prefill_ends_with_the_first_token_and_decode_with_the_last() -> None:
    recorded = Recorded()
    spans = spans_into(recorded)
    spans.begin(asked())
    spans.step(delta(0, 7, cached=2))
    spans.step(delta(1, 8, 9, finish=FinishReason.STOP))
    prefill, decode = recorded.spans
    assert (prefill.name, decode.name) == ("prefill", "decode")
    assert prefill.attributes["cached_tokens"] == 2
    assert decode.attributes["generated_tokens"] == 3
    assert {str(span.parent) for span in recorded.spans} == {PARENT}
    assert len(spans) == 0


def test_where_the_engine_tells_of_its_queue_that_is_a_span_of_its_own() -> None:
    recorded, clock = Recorded(), SetClock()
    spans = RequestSpans(Tracer(recorded, clock, Chance()), "worker-0")
    spans.begin(asked())
    clock.s += 5.0
    spans.step(StepOutput((TokenDelta("r", 0, (7,), queued_ms=3500.0),)))
    queue, prefill = recorded.spans
    assert (queue.name, queue.start_unix_s, queue.end_unix_s) == ("engine_queue", 1000.0, 1003.5)
    assert (prefill.name, prefill.start_unix_s, prefill.end_unix_s) == ("prefill", 1003.5, 1005.0)


def test_a_request_that_moves_is_decoded_twice() -> None:
    recorded = Recorded()
    source, target = spans_into(recorded), spans_into(recorded)
    source.begin(asked())
    source.step(delta(0, 7))
    target.begin(asked(), is_moved=True)
    source.end("r", moved_to="worker-1")
    target.step(delta(1, 8, finish=FinishReason.LENGTH))
    assert [span.name for span in recorded.spans] == ["prefill", "decode", "decode"]
    assert recorded.spans[1].attributes["moved_to"] == "worker-1"
    assert len(source) == len(target) == 0


def test_nobody_s_requests_are_not_kept() -> None:
    recorded = Recorded()
    spans = spans_into(recorded)
    spans.begin(asked("a", ""))
    spans.begin(asked("b", UNSAMPLED))
    spans.step(delta(0, 7))
    assert (len(spans), recorded.spans) == (0, [])


def test_requests_that_never_end_are_given_up() -> None:
    spans = spans_into(Recorded())
    for number in range(request_spans.MAX_OPEN + 5):
        spans.begin(asked(f"r{number}"))
    assert len(spans) == request_spans.MAX_OPEN
