import asyncio
import itertools
from contextlib import suppress

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from prometheus_client import CollectorRegistry

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


async def test_a_turn_that_does_not_come_in_time_is_an_error() -> None:
    gate = AdmissionGate(AdmissionQueue(1, 10), lambda: 0.0, FrontendMetrics(CollectorRegistry()))
    async with gate.admitted("first", 0, 10.0):
        with pytest.raises(ApiError) as error:
            async with gate.admitted("second", 0, 0.01):
                pass
        assert error.value.status == 504
    assert (gate.queue.running, gate.queue.queued) == (0, 0)
