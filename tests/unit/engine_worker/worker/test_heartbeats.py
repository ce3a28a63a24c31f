"""When a worker says that it lives."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.liveness import HEARTBEAT_S, Heartbeats
from penstock.v1 import worker_pb2
from tests.unit.engine_worker.worker.running_worker import FrontendStream, RunningWorker

pytestmark = pytest.mark.live

TICK_S = 0.05


@given(st.lists(st.booleans(), min_size=1, max_size=100))
def test_a_stream_with_requests_is_never_silent_for_longer_than_a_heartbeat_and_a_tick(steps: list[bool]) -> None:
    heartbeats, messages, last_s = Heartbeats(), 0, 0.0
    for number, has_step in enumerate(steps):
        now_s = number * TICK_S
        if has_step:
            messages, last_s = messages + 1, now_s
        for stream_id in heartbeats.due(now_s, {7: messages}, {7}):
            assert stream_id == 7
            assert now_s - last_s >= HEARTBEAT_S - 1e-9, "a step's output is as good"
            messages, last_s = messages + 1, now_s
        assert now_s - last_s <= HEARTBEAT_S + 2 * TICK_S


async def test_a_stream_that_asked_for_them_gets_heartbeats_while_it_has_requests(worker: RunningWorker) -> None:
    asking, plain = FrontendStream(worker.stub.Stream()), await worker.connect("frontend-1")
    hello = worker_pb2.FrontendHello(frontend_id="frontend-0", wants_heartbeats=True)
    await asking.call.write(worker_pb2.FrontendMessage(hello=hello))
    await asking.read()
    streams = {stream.frontend_id: stream for stream in worker.instance.streams.values()}

    def tick() -> None:
        for _ in range(10):
            worker.clock.now_s += TICK_S
            worker.instance.tick()

    tick()
    assert streams["frontend-0"].messages == 1, "the hello"
    await asking.generate("a")
    await plain.generate("b")
    await worker.until(lambda: len(worker.engine.requests) == 2)
    tick()
    heartbeats = [await asking.read() for _ in range(2)]
    assert all(message.HasField("heartbeat") for message in heartbeats)
    assert heartbeats[1].heartbeat.stalled_ms > heartbeats[0].heartbeat.stalled_ms > 0, "no step was made"
    assert streams["frontend-1"].messages == 1
    worker.engine.step(finish={"a", "b"})
    await asyncio.sleep(0)
    while not (await asking.read()).HasField("step"):
        pass
    sent = streams["frontend-0"].messages
    tick()
    assert streams["frontend-0"].messages == sent
