"""The frontend and the simulator drive one cascade state machine: of the same answers and scores they tell it the same
events and get the same instructions."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from controlplane.protocols.cascade.state_machine import CascadeStateMachine, Event, Instruction
from simulator.cascade.executor import SimulatedExecutor
from tests.unit.services.frontend.cascade_of_fakes import RECORD, cascade

pytestmark = pytest.mark.live

NEVER = 100.5
"""A threshold that no score meets."""


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Event, tuple[Instruction, ...]]]:
    """What the state machines are told and answer, whoever drives them."""
    entries: list[tuple[Event, tuple[Instruction, ...]]] = []
    handle = CascadeStateMachine.handle

    def noted(machine: CascadeStateMachine, event: Event, now_s: float) -> tuple[Instruction, ...]:
        instructions = handle(machine, event, now_s)
        machine.validate()
        entries.append((event, instructions))
        return instructions

    monkeypatch.setattr(CascadeStateMachine, "handle", noted)
    return entries


@pytest.mark.slow
@pytest.mark.parametrize(("threshold", "score"), [(70.0, 70.0), (70.0, 69.0), (0.0, 10.0), (NEVER, 10.0)])
async def test_of_the_same_scores_both_get_the_same_instructions(
    log: list[tuple[Event, tuple[Instruction, ...]]], model_path: Path, threshold: float, score: float
) -> None:
    executor = SimulatedExecutor((threshold,), np.array([3.0]), 0.5)
    for tier in range(2):
        requests = executor.asked(tier)
        finished_s, whole = executor.ready_s[requests] + 1.0, np.zeros(len(requests), np.bool_)
        executor.answered(tier, requests, finished_s, np.full(len(requests), score), whole)
    executor.validate()
    simulated = list(log)
    log.clear()

    async with cascade(model_path, lambda _: score, msgspec.structs.replace(RECORD, thresholds=(threshold,))) as both:
        answer = (await both.ask()).parse()
        assert answer.penstock["tier"] == RECORD.tiers[executor.accepted_by[0]]
    assert log == simulated
