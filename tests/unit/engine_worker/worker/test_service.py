"""The worker over real gRPC on loopback, with a scripted engine."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import grpc
import pytest
from prometheus_client import CollectorRegistry

from controlplane.model.instance import LoadReport
from controlplane.model.request import TokenDelta
from engine_worker.service import WorkerService
from mesh.errors import EngineFailed
from mesh.runtime import SystemThreads
from penstock.v1 import request_pb2, worker_pb2
from tests.unit.engine_worker.worker.fake_engine import make_request
from tests.unit.engine_worker.worker.running_worker import (
    SETTINGS,
    FrontendStream,
    RunningWorker,
    running_worker,
)

pytestmark = pytest.mark.live


async def status_of(stream: FrontendStream) -> tuple[grpc.StatusCode, str]:
    """How the stream ended."""
    async with asyncio.timeout(5.0):
        return await stream.call.code(), await stream.call.details()


async def test_the_hello_names_the_incarnation(worker: RunningWorker) -> None:
    stream = FrontendStream(worker.stub.Stream())
    hello = await stream.hello()
    assert (hello.instance_id, hello.incarnation_id) == ("worker-0", "0badcafe")


async def test_one_message_per_step_and_stream_with_that_streams_deltas_only(worker: RunningWorker) -> None:
    first, second = await worker.connect("frontend-0"), await worker.connect("frontend-1")
    for request_id in ("a", "b"):
        await first.generate(request_id)
    await second.generate("c", emitted_token_ids=[7, 8])
    await worker.until(lambda: len(worker.engine.requests) == 3)
    worker.engine.step()
    worker.engine.step(finish={"a", "c"})
    step = await first.deltas()
    assert {key: (delta.offset, list(delta.token_ids)) for key, delta in step.items()} == {
        "a": (0, [100]),
        "b": (0, [100]),
    }
    assert (await second.only_delta()).offset == 2
    step = await first.deltas()
    assert step["a"].finish_reason == request_pb2.FINISH_REASON_STOP
    assert step["b"].finish_reason == request_pb2.FINISH_REASON_UNSPECIFIED
    assert (await second.only_delta()).finish_reason == request_pb2.FINISH_REASON_STOP


async def test_an_aborted_request_ends_with_abort(worker: RunningWorker) -> None:
    stream = await worker.connect()
    await stream.generate("a")
    await stream.abort("a")
    await stream.abort("never-seen")
    await worker.until(lambda: worker.engine.aborted == ["a"])
    worker.engine.step()
    assert (await stream.only_delta()).finish_reason == request_pb2.FINISH_REASON_ABORT


async def test_the_end_of_a_stream_aborts_its_requests_only(worker: RunningWorker) -> None:
    leaving, staying = await worker.connect("frontend-0"), await worker.connect("frontend-1")
    await leaving.generate("a")
    await staying.generate("b")
    await worker.until(lambda: len(worker.engine.requests) == 2)
    leaving.call.cancel()
    await worker.until(lambda: worker.engine.aborted == ["a"])
    worker.engine.step()
    assert list(await staying.deltas()) == ["b"]
    assert len(worker.instance.streams) == 1


async def test_a_frontend_that_only_stops_sending_still_gets_its_answers(worker: RunningWorker) -> None:
    stream = await worker.connect()
    await stream.generate("a")
    await stream.call.done_writing()
    await worker.until(lambda: "a" in worker.engine.requests)
    worker.engine.step()
    worker.engine.step(finish={"a"})
    assert [(await stream.only_delta()).offset for _ in range(2)] == [0, 1]
    assert await stream.read() is grpc.aio.EOF
    assert (await status_of(stream))[0] is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model": "other"}, "serves 'm', not 'other'"),
        ({"prompt_token_ids": []}, "prompt is empty"),
        ({"prompt_token_ids": [1] * 2000}, "2000 prompt tokens are more than the model takes"),
        ({"sampling": request_pb2.SamplingParams(max_tokens=1)}, "top_p must be above 0"),
    ],
)
async def test_a_refusal_is_a_delta_and_the_stream_goes_on(
    worker: RunningWorker, fields: dict[str, Any], reason: str
) -> None:
    stream = await worker.connect()
    await stream.generate("bad", **fields)
    delta = await stream.only_delta()
    assert (delta.request_id, delta.finish_reason) == ("bad", request_pb2.FINISH_REASON_ERROR)
    assert delta.error.code == request_pb2.ERROR_CODE_REFUSED
    assert reason in delta.error.message
    await stream.generate("good")
    await worker.until(lambda: "good" in worker.engine.requests)
    worker.engine.step()
    assert (await stream.only_delta()).request_id == "good"


async def test_an_engine_that_knows_no_adapters_never_answers_as_the_model_itself(worker: RunningWorker) -> None:
    stream = await worker.connect()
    adapter = request_pb2.Adapter(name="poet", digest="d1", path="/poet")
    await stream.generate("a", adapter=adapter)
    delta = await stream.only_delta()
    assert delta.error.code == request_pb2.ERROR_CODE_UNAVAILABLE
    assert "serves no LoRA adapters" in delta.error.message
    assert not worker.engine.requests


async def test_a_duplicate_id_is_refused(worker: RunningWorker) -> None:
    first, second = await worker.connect("frontend-0"), await worker.connect("frontend-1")
    await first.generate("a")
    await worker.until(lambda: "a" in worker.engine.requests)
    await second.generate("a")
    assert (await second.only_delta()).error.code == request_pb2.ERROR_CODE_REFUSED
    worker.engine.step()
    assert list((await first.only_delta()).token_ids) == [100]


async def test_more_requests_than_the_limit_are_unavailable_not_refused(worker: RunningWorker) -> None:
    stream = await worker.connect()
    for number in range(SETTINGS.max_requests + 1):
        await stream.generate(f"r{number}")
    delta = await stream.only_delta()
    assert (delta.request_id, delta.error.code) == ("r8", request_pb2.ERROR_CODE_UNAVAILABLE)


async def test_a_request_past_its_deadline_ends_with_the_tokens_it_had(worker: RunningWorker) -> None:
    stream = await worker.connect()
    await stream.generate("a", deadline_ms=1500)
    await stream.generate("b")
    await worker.until(lambda: len(worker.engine.requests) == 2)
    worker.engine.step()
    await stream.deltas()
    worker.clock.now_s += 1.4
    worker.instance.tick()
    assert worker.engine.aborted == []
    worker.clock.now_s += 0.2
    worker.instance.tick()
    delta = await stream.only_delta()
    assert (delta.request_id, delta.offset, delta.error.code) == ("a", 1, request_pb2.ERROR_CODE_DEADLINE)
    assert worker.engine.aborted == ["a"]
    worker.engine.step()
    assert list(await stream.deltas()) == ["b"], "the engine's own end of a told request is swallowed"


@pytest.mark.parametrize("hello", [False, True])
async def test_messages_out_of_order_break_the_stream_with_the_rule(worker: RunningWorker, hello: bool) -> None:
    stream = FrontendStream(worker.stub.Stream())
    if hello:
        await stream.hello()
        await stream.call.write(worker_pb2.FrontendMessage(hello=worker_pb2.FrontendHello(frontend_id="again")))
    else:
        await stream.generate("a")
    code, details = await status_of(stream)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "hello" in details.lower()
    await worker.until(lambda: worker.instance.streams == {})


async def test_nothing_refuses_a_stream_while_its_hello_is_being_sent(worker: RunningWorker) -> None:
    """grpc.aio would never send such a status: see `WorkerService._exchange`."""
    said: list[str] = []
    begun, go_on = asyncio.Event(), asyncio.Event()

    class Context:
        async def write(self, message: worker_pb2.WorkerMessage) -> None:
            begun.set()
            await go_on.wait()
            said.append(message.WhichOneof("message"))

        async def abort(self, code: grpc.StatusCode, details: str) -> None:
            said.append(code.name)
            raise grpc.aio.AbortError

    async def hellos() -> AsyncIterator[worker_pb2.FrontendMessage]:
        for _ in range(2):
            yield worker_pb2.FrontendMessage(hello=worker_pb2.FrontendHello(frontend_id="again"))

    service = WorkerService(worker.instance, worker.clock, SystemThreads())
    streaming = asyncio.create_task(service.Stream(hellos(), cast(Any, Context())))
    await begun.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    assert said == []
    go_on.set()
    with pytest.raises(grpc.aio.AbortError):
        await streaming
    assert said == ["hello", "INVALID_ARGUMENT"]


async def test_more_frontends_than_the_limit_are_turned_away(worker: RunningWorker) -> None:
    streams = [await worker.connect(f"frontend-{number}") for number in range(SETTINGS.max_streams)]
    extra = FrontendStream(worker.stub.Stream())
    await extra.call.write(worker_pb2.FrontendMessage(hello=worker_pb2.FrontendHello(frontend_id="extra")))
    code, _ = await status_of(extra)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    streams[0].call.cancel()
    await worker.until(lambda: len(worker.instance.streams) == 2)
    assert await worker.connect("extra")


@pytest.mark.slow
async def test_a_frontend_that_does_not_read_is_cut_off_and_nobody_else_is(caplog: Any) -> None:
    registry = CollectorRegistry()
    async with running_worker(replace(SETTINGS, stream_buffer_messages=20), registry) as worker:
        deaf, healthy = await worker.connect("deaf"), await worker.connect("healthy")
        await deaf.generate("a", sampling=request_pb2.SamplingParams(max_tokens=2**31, top_p=1, repetition_penalty=1))
        await healthy.generate("b")
        await worker.until(lambda: len(worker.engine.requests) == 2)
        steps = 0
        while not worker.engine.aborted:
            worker.engine.step(tokens=2000)
            await healthy.read()
            steps += 1
            assert steps < 2000, "flow control never reached the worker"
        assert worker.engine.aborted == ["a"]
        await worker.until(lambda: len(worker.instance.streams) == 1)
        assert "a frontend is cut off" in caplog.text
        assert registry.get_sample_value("penstock_worker_cut_streams_total") == 1.0
        code, details = await drained_status(deaf)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "frontend deaf does not read" in details
        worker.engine.step()
        assert "b" in await healthy.deltas()


async def test_what_a_cut_frontend_still_sends_reaches_no_engine(worker: RunningWorker) -> None:
    stream = worker.instance.open_stream("frontend-0")
    stream.cut("does not read")
    worker.instance.close_stream(stream)
    worker.instance.submit(stream, make_request("a"), model="m")
    assert worker.engine.requests == {}


async def drained_status(stream: FrontendStream) -> tuple[grpc.StatusCode, str]:
    """The status of a stream whose frontend begins to read at last."""
    try:
        while await stream.read() is not grpc.aio.EOF:
            continue
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return await status_of(stream)


async def test_describe_load_and_list(worker: RunningWorker) -> None:
    stream = await worker.connect("frontend-7")
    await stream.generate("a", emitted_token_ids=[5])
    await worker.until(lambda: "a" in worker.engine.requests)
    worker.clock.now_s += 0.25
    described = await worker.stub.Describe(worker_pb2.DescribeRequest())
    assert (described.instance.instance_id, described.state) == ("worker-0", worker_pb2.INSTANCE_STATE_READY)
    assert described.instance.kv_blocks == 100
    assert (described.instance.tensor_parallel, described.instance.pipeline_parallel) == (1, 1)
    load = (await worker.stub.GetLoad(worker_pb2.GetLoadRequest())).load
    assert (load.queued_requests, load.queued_prefill_tokens) == (1, 4)
    (listed,) = (await worker.stub.ListRequests(worker_pb2.ListRequestsRequest())).requests
    assert (listed.request_id, listed.prompt_tokens, listed.generated_tokens) == ("a", 3, 1)
    assert (listed.frontend_id, listed.age_ms) == ("frontend-7", 250)


async def test_a_draining_worker_finishes_what_runs_and_takes_nothing_new(worker: RunningWorker) -> None:
    stream = await worker.connect()
    await stream.generate("a")
    await worker.until(lambda: "a" in worker.engine.requests)
    assert (await worker.stub.Drain(worker_pb2.DrainRequest())).running_requests == 1
    await stream.generate("b")
    delta = await stream.only_delta()
    assert (delta.request_id, delta.error.code) == ("b", request_pb2.ERROR_CODE_UNAVAILABLE)
    drained = asyncio.create_task(worker.instance.drained())
    worker.engine.step(finish={"a"})
    assert (await stream.only_delta()).finish_reason == request_pb2.FINISH_REASON_STOP
    await asyncio.wait_for(drained, 5.0)


async def test_an_idle_worker_is_drained_at_once(worker: RunningWorker) -> None:
    assert worker.instance.start_draining() == 0
    await asyncio.wait_for(worker.instance.drained(), 5.0)


async def test_what_still_runs_at_the_stop_ends_with_unavailable(worker: RunningWorker) -> None:
    stream = await worker.connect()
    await stream.generate("a")
    await worker.until(lambda: "a" in worker.engine.requests)
    worker.engine.step()
    await stream.only_delta()
    await asyncio.wait_for(worker.instance.stop(flush_s=5.0), 5.0)
    delta = await stream.only_delta()
    assert (delta.request_id, delta.offset) == ("a", 1)
    assert delta.error.code == request_pb2.ERROR_CODE_UNAVAILABLE
    assert await stream.read() is grpc.aio.EOF
    assert worker.engine.aborted == ["a"]


async def test_when_the_engine_dies_every_request_is_told(worker: RunningWorker) -> None:
    first, second = await worker.connect("frontend-0"), await worker.connect("frontend-1")
    await first.generate("a")
    await second.generate("b")
    await worker.until(lambda: len(worker.engine.requests) == 2)
    worker.engine.die("core dumped")
    for stream in (first, second):
        delta = await stream.only_delta()
        assert delta.error.code == request_pb2.ERROR_CODE_UNAVAILABLE
        assert delta.error.message == "core dumped"
    with pytest.raises(EngineFailed, match="core dumped"):
        await asyncio.wait_for(worker.output, 5.0)
    await first.generate("c")
    assert (await first.only_delta()).error.code == request_pb2.ERROR_CODE_UNAVAILABLE


async def test_output_that_just_ends_is_a_death_too(worker: RunningWorker) -> None:
    await worker.engine.stop()
    with pytest.raises(EngineFailed, match="without being asked"):
        await asyncio.wait_for(worker.output, 5.0)


async def test_a_hung_engine_is_loud_and_takes_nothing_new(worker: RunningWorker, caplog: Any) -> None:
    changes: list[bool] = []
    worker.instance.on_hang_change.append(lambda: changes.append(worker.instance.hung))
    stream = await worker.connect()
    await stream.generate("a")
    await worker.until(lambda: "a" in worker.engine.requests)
    worker.engine.present_load = LoadReport(running_requests=1)
    worker.instance.tick()
    worker.clock.now_s += SETTINGS.hang_s + 0.1
    worker.instance.tick()
    assert changes == [True]
    assert "the engine hangs" in caplog.text
    await stream.generate("b")
    assert (await stream.only_delta()).error.code == request_pb2.ERROR_CODE_UNAVAILABLE
    worker.engine.step()
    await stream.only_delta()
    worker.instance.tick()
    assert changes == [True, False]


async def test_output_for_nobody_is_counted_and_logged(caplog: Any) -> None:
    registry = CollectorRegistry()
    async with running_worker(registry=registry) as worker:
        worker.engine.put_step(TokenDelta("ghost", 0, (1,)))
        await worker.until(lambda: registry.get_sample_value("penstock_worker_stray_deltas_total") == 1.0)
        assert "requests that are not here" in caplog.text


async def test_an_engine_that_skips_tokens_ends_the_request(worker: RunningWorker) -> None:
    stream = await worker.connect()
    await stream.generate("a")
    await worker.until(lambda: "a" in worker.engine.requests)
    worker.engine.put_step(TokenDelta("a", 3, (1,)))
    delta = await stream.only_delta()
    assert delta.error.code == request_pb2.ERROR_CODE_ENGINE
    assert "at token 3 instead of 0" in delta.error.message
    assert worker.engine.aborted == ["a"]


async def test_a_request_is_given_back_where_more_waits_than_was_believed() -> None:
    registry = CollectorRegistry()
    async with running_worker(replace(SETTINGS, bounce_tokens=10), registry) as worker:
        stream = await worker.connect()
        await stream.generate("a", prompt_token_ids=[5] * 40)
        await worker.until(lambda: len(worker.engine.requests) == 1)

        def belief(queued: int, **fields: Any) -> request_pb2.QueueBelief:
            return request_pb2.QueueBelief(
                **{"queued_prefill_tokens": queued, "new_prefill_tokens": 7, "may_bounce": True, **fields}
            )

        await stream.generate("b", belief=belief(29), epoch=3)
        delta = await stream.only_delta()
        assert (delta.request_id, delta.epoch, delta.error.code) == ("b", 3, request_pb2.ERROR_CODE_BOUNCED)
        assert (delta.error.present.queued_prefill_tokens, delta.error.present.requests) == (40, 1)
        await stream.generate("b", belief=belief(29, may_bounce=False), epoch=3)
        await stream.generate("c", belief=belief(37), prompt_token_ids=[5] * 40)
        await stream.generate("d")
        await worker.until(lambda: len(worker.engine.requests) == 4)
        worker.instance.table.prefills.validate()
        assert worker.instance.table.prefills.queued_tokens(1000) == 40 + 3 + 7 + 3, "no prompt has more than it has"
        worker.engine.step()
        await worker.until(lambda: len(worker.instance.table.prefills) == 0)  # their first tokens are out
        assert registry.get_sample_value("penstock_worker_bounces_total") == 1
        assert registry.get_sample_value("penstock_worker_failures_total", {"code": "bounced"}) is None
