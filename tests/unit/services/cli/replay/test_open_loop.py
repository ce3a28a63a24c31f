import asyncio

from services.cli.replay.open_loop import ReplayLog, replay
from simulator.report.outcome import RequestOutcome
from simulator.traces.request import TraceRequest


class JumpingClock:
    """Time passes only where somebody sleeps or works."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    async def sleep_until(self, due_s: float) -> None:
        await asyncio.sleep(0)
        self.time_s = max(self.time_s, due_s)


def trace(*arrivals_s: float) -> list[TraceRequest]:
    return [TraceRequest(arrival_s, 10, 2) for arrival_s in arrivals_s]


def encode(index: int, request: TraceRequest) -> bytes:
    return b"%d" % index


async def test_requests_are_sent_when_due_whatever_became_of_the_others() -> None:
    clock, log = JumpingClock(), ReplayLog()
    sent: list[tuple[bytes, float]] = []
    nobody_ends_before_all_are_sent = asyncio.Event()

    async def send(encoded: bytes, arrival_s: float) -> tuple[RequestOutcome, str]:
        sent.append((encoded, clock.now_s()))
        if len(sent) == 3:
            nobody_ends_before_all_are_sent.set()
        await nobody_ends_before_all_are_sent.wait()
        return RequestOutcome(arrival_s, clock.now_s(), output_tokens=2), "lmetric"

    await replay(trace(0.0, 1.5, 7.0), encode, send, clock, 100, log)
    assert sent == [(b"0", 0.0), (b"1", 1.5), (b"2", 7.0)]
    assert log.lags_s == [0.0, 0.0, 0.0]
    assert (log.sent, log.in_flight, log.policies, log.other_lengths) == (3, 0, {"lmetric"}, 0)


async def test_a_slow_client_is_found_out() -> None:
    clock, log = JumpingClock(), ReplayLog()

    def slow_encode(index: int, request: TraceRequest) -> bytes:
        clock.time_s += 2.0
        return b""

    async def send(encoded: bytes, arrival_s: float) -> tuple[RequestOutcome, str]:
        return RequestOutcome(arrival_s, clock.now_s(), output_tokens=2), ""

    await replay(trace(0.0, 1.0, 10.0), slow_encode, send, clock, 100, log)
    assert log.lags_s == [2.0, 3.0, 0.0]


async def test_a_limit_holds_the_next_request_back_and_counts_it_as_lag() -> None:
    clock, log = JumpingClock(), ReplayLog()
    running = most = 0

    async def send(encoded: bytes, arrival_s: float) -> tuple[RequestOutcome, str]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(5):
            await asyncio.sleep(0)
        clock.time_s += 1.0
        running -= 1
        return RequestOutcome(arrival_s, clock.now_s(), output_tokens=1), ""

    await replay(trace(0.0, 0.0, 0.0, 0.0), encode, send, clock, 2, log)
    assert most == 2
    assert log.held_back >= 1
    assert max(log.lags_s) >= 1.0
    assert log.other_lengths == 4


async def test_an_interrupted_replay_keeps_what_has_ended() -> None:
    clock, log = JumpingClock(), ReplayLog()
    second_is_running = asyncio.Event()

    async def send(encoded: bytes, arrival_s: float) -> tuple[RequestOutcome, str]:
        if encoded == b"1":
            second_is_running.set()
            await asyncio.Event().wait()
        return RequestOutcome(arrival_s, clock.now_s(), error="no"), ""

    task = asyncio.create_task(replay(trace(0.0, 1.0), encode, send, clock, 10, log))
    await second_is_running.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert (len(log.outcomes), log.errors, log.in_flight) == (1, 1, 1)
