import asyncio
import itertools
from contextlib import suppress

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from prometheus_client import CollectorRegistry

from controlplane.model.request import Tenant
from services.frontend.errors import ApiError
from services.frontend.metrics import FrontendMetrics
from services.frontend.requests.admission import (
    AdmissionGate,
    AdmissionQueue,
    Admitted,
    AlreadyKnown,
    PriorityClass,
    Queued,
    Refused,
    class_of,
)

MAX_RUNNING, MAX_QUEUED = 2, 3


class AdmissionMachine(RuleBasedStateMachine):
    """Against a model that keeps plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = AdmissionQueue(MAX_RUNNING, MAX_QUEUED)
        self.running: list[int] = []
        self.waiting: list[tuple[PriorityClass, int]] = []
        self.names = itertools.count()
        self.now_s = 0.0

    @rule(priority=st.integers(-2, 2), elapsed_s=st.floats(0, 10))
    def offer(self, priority: int, elapsed_s: float) -> None:
        self.now_s += elapsed_s
        ticket, wanted = next(self.names), class_of(priority)
        verdict = self.queue.offer(ticket, priority, self.now_s)
        if len(self.running) < MAX_RUNNING:
            assert verdict == Admitted()
            self.running.append(ticket)
        elif sum(waits is wanted for waits, _ in self.waiting) < MAX_QUEUED:
            assert verdict == Queued()
            self.waiting.append((wanted, ticket))
        else:
            assert isinstance(verdict, Refused)
            assert 1 <= verdict.retry_after_s <= 60

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.running:
            ticket = data.draw(st.sampled_from(self.running))
            self.running.remove(ticket)
            admitted = self.queue.release(ticket, self.now_s)
            if self.waiting:
                self.waiting.sort(key=lambda waits: waits[0])  # stable: first come, first served
                assert admitted == self.waiting.pop(0)[1]
                self.running.append(admitted)
            else:
                assert admitted is None

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        if self.waiting:
            waits = data.draw(st.sampled_from(self.waiting))
            self.waiting.remove(waits)
            self.queue.withdraw(waits[1])

    @invariant()
    def agrees(self) -> None:
        assert (self.queue.running, self.queue.queued) == (len(self.running), len(self.waiting))
        assert self.queue.queued == 0 or self.queue.running == MAX_RUNNING, "nobody waits beside a free place"


TestAdmission = AdmissionMachine.TestCase


def test_retry_after_follows_the_drain_rate() -> None:
    queue = AdmissionQueue(1, 10)
    for ticket in range(11):
        queue.offer(ticket, 0, 0.0)
    for ticket in range(4):  # one every two seconds
        queue.release(ticket, 2.0 * (ticket + 1))
    for ticket in range(11, 15):
        queue.offer(ticket, 0, 8.0)
    refused = queue.offer(99, 0, 8.0)
    assert isinstance(refused, Refused)
    assert refused.retry_after_s == pytest.approx(10 / (4 / 6.0))


def test_a_ticket_is_offered_once() -> None:
    queue = AdmissionQueue(1, 1)
    queue.offer("a", 0, 0.0)
    with pytest.raises(AlreadyKnown):
        queue.offer("a", 0, 0.0)


@pytest.mark.live
async def test_the_gate_survives_every_order_of_turns_and_cancellations() -> None:
    metrics = FrontendMetrics(CollectorRegistry())
    for cancelled in itertools.product([False, True], repeat=4):
        gate = AdmissionGate(AdmissionQueue(1, 10), lambda: 0.0, metrics)
        served: list[int] = []

        async def visit(ticket: int, gate: AdmissionGate, served: list[int]) -> None:
            async with gate.admitted(ticket, 0, 10.0):
                await asyncio.sleep(0)
                served.append(ticket)

        tasks = [asyncio.create_task(visit(ticket, gate, served)) for ticket in range(4)]
        await asyncio.sleep(0)
        for task, cancel in zip(tasks, cancelled, strict=True):
            if cancel:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        assert served == [ticket for ticket in range(4) if not cancelled[ticket]]
        assert (gate.queue.running, gate.queue.queued) == (0, 0)


@pytest.mark.live
async def test_a_turn_that_does_not_come_in_time_is_an_error() -> None:
    gate = AdmissionGate(AdmissionQueue(1, 10), lambda: 0.0, FrontendMetrics(CollectorRegistry()))
    async with gate.admitted("first", 0, 10.0):
        with pytest.raises(ApiError) as error:
            async with gate.admitted("second", 0, 0.01):
                pass
        assert error.value.status == 504
    assert (gate.queue.running, gate.queue.queued) == (0, 0)


def test_tenants_come_in_by_their_shares() -> None:
    queue = AdmissionQueue(1, 100)
    queue.offer("running", 0, 0.0)
    for number in range(60):
        queue.offer(("greedy", number), 0, 0.0, Tenant("greedy"))
    queue.offer(("modest", 0), 0, 0.0, Tenant("modest"))
    queue.offer(("double", 0), 0, 0.0, Tenant("double", 2.0))
    order, last = [], "running"
    for _ in range(62):
        last = queue.release(last, 1.0, tokens=512)
        order.append(last)
    assert sorted(map(str, order)) == sorted(map(str, {*order}))
    assert {("modest", 0), ("double", 0)} <= set(order[:40]), "they do not wait for all that came before them"
    assert [each for each in order if each[0] == "greedy"] == [("greedy", number) for number in range(60)]


def test_a_full_queue_makes_room_for_who_has_less_of_it() -> None:
    queue = AdmissionQueue(1, 4)
    queue.offer("running", 0, 0.0)
    for number in range(4):
        assert queue.offer(("greedy", number), 0, 0.0, Tenant("greedy")) == Queued()
    assert isinstance(queue.offer(("greedy", 4), 0, 0.0, Tenant("greedy")), Refused)
    displaced = queue.offer("modest", 0, 0.0, Tenant("modest"))
    assert isinstance(displaced, Queued)
    assert displaced.displaced == ("greedy", 3)
    assert displaced.retry_after_s >= 1
    assert not queue.is_waiting(("greedy", 3))
    assert queue.queued == 4
    queue.offer("modest 2", 0, 0.0, Tenant("modest"))
    assert isinstance(queue.offer("modest 3", 0, 0.0, Tenant("modest")), Refused), "two each: nobody has more"


@pytest.mark.live
async def test_who_is_displaced_is_told_when_to_come_again() -> None:
    queue = AdmissionQueue(1, 1)
    gate = AdmissionGate(queue, lambda: 0.0, FrontendMetrics(CollectorRegistry()))
    async with gate.admitted("running", 0, 10.0):

        async def wait(name: str) -> None:
            async with gate.admitted(name, 0, 10.0, Tenant(name), lambda: 100):
                pass

        first = asyncio.create_task(wait("greedy"))
        await asyncio.sleep(0)
        second = asyncio.create_task(wait("heavy"))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="Too many requests are waiting") as refused:
            await second
        assert refused.value.status == 429
        third = asyncio.create_task(wait("twice"))
        await asyncio.sleep(0)
        assert not first.done()
        third.cancel()
        with suppress(asyncio.CancelledError, ApiError):
            await third
    await first
    assert queue.running == queue.queued == 0
