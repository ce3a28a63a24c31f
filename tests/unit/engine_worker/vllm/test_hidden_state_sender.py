"""Rows that are put faster than they are sent: dropped while an engine serves, waited for while it is sampled."""

import threading
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from engine_worker.engines.vllm.hidden_states.capture import Rows
from engine_worker.engines.vllm.hidden_states.message import CapturedStates
from engine_worker.engines.vllm.hidden_states.sender import HiddenStateSender

STEPS = 100
HELD = 17
"""Steps that a sender holds for a receiver that takes none: the one that it is sending, and those that wait."""


class Tensor:
    """A tensor on the host."""

    def __init__(self, step: int) -> None:
        self._values = np.full((1, 2), step, np.float32)

    def float(self) -> "Tensor":
        return self

    def cpu(self) -> "Tensor":
        return self

    def numpy(self) -> NDArray[np.float32]:
        return self._values


class Receiver:
    """Takes messages once it is `ready`; `asked` once it was given the first, `all_came` once it has the last."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.ready = threading.Event()
        self.all_came = threading.Event()
        self.steps: list[int] = []

    def open(self) -> Callable[[bytes], None]:
        return self.take

    def take(self, message: bytes) -> None:
        self.asked.set()
        self.ready.wait()
        captured = msgspec.msgpack.decode(message, type=CapturedStates)
        assert np.frombuffer(captured.states, "<f4").tolist() == [captured.step, captured.step]
        self.steps.append(captured.step)
        if captured.step == STEPS:
            self.all_came.set()


def rows(step: int) -> Rows:
    return Rows(step, ["a-00000000"], [step], Tensor(step))


def filled(receiver: Receiver) -> HiddenStateSender:
    """A sender that has room for no further step."""
    sender = HiddenStateSender(receiver.open)
    sender.put(rows(1))
    assert receiver.asked.wait(60)
    for step in range(2, HELD + 1):
        sender.put(rows(step))
    assert sender.dropped_steps_total == 0
    return sender


def test_a_step_never_waits_for_a_receiver_that_lags(caplog: pytest.LogCaptureFixture) -> None:
    receiver = Receiver()
    sender = filled(receiver)
    for step in range(HELD + 1, STEPS):
        sender.put(rows(step))
    assert sender.dropped_steps_total == STEPS - 1 - HELD
    assert [record.message for record in caplog.records] == [
        "captured hidden states are dropped: they come faster than they are taken"
    ]
    receiver.ready.set()
    sender.patience_s = 60.0
    sender.put(rows(STEPS))
    assert receiver.all_came.wait(60)
    assert receiver.steps == [*range(1, HELD + 1), STEPS]


def test_with_patience_no_step_is_lost() -> None:
    receiver = Receiver()
    sender = filled(receiver)
    sender.patience_s = 60.0

    def run_steps() -> None:
        for step in range(HELD + 1, STEPS + 1):
            sender.put(rows(step))

    engine = threading.Thread(target=run_steps)
    engine.start()
    receiver.ready.set()
    engine.join()
    assert receiver.all_came.wait(60)
    assert sender.dropped_steps_total == 0
    assert receiver.steps == list(range(1, STEPS + 1))
