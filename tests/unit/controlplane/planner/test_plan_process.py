"""The process that makes plans: within a deadline, and another after one that was lost."""

import os
import signal
import time
from typing import Any

import pytest

from controlplane.planner.cascade.plan_process import PlanProcess
from mesh.errors import ConfigurationError, DeadlineExceeded, PeerUnavailable
from simulator.cascade import make_plan as make_plan_module
from tests.unit.controlplane.planner.cascade_windows import GOAL, lines, window


def hang(*_: Any) -> None:
    time.sleep(3600)


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.process
async def test_a_plan_that_takes_too_long_ends_its_process_and_the_next_gets_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = PlanProcess(0, deadline_s=60.0)
    with pytest.raises(ConfigurationError, match="names 1 tiers, the workload has 2"):
        await process.make(_goal_of_one(), lines(window()), {})
    pid = process._process._pid
    assert is_running(pid)
    monkeypatch.setattr(make_plan_module, "make_plan", hang)
    process._process._deadline_s = 0.3
    with pytest.raises(DeadlineExceeded, match=r"within 0\.3 s.*--plan-deadline-s"):
        await process.make(GOAL, lines(window()), {})
    assert not _runs_on(pid)
    monkeypatch.setattr(make_plan_module, "make_plan", die)
    process._process._deadline_s = 60.0
    with pytest.raises(PeerUnavailable, match="has died"):
        await process.make(GOAL, lines(window()), {})
    monkeypatch.undo()
    with pytest.raises(ConfigurationError, match="names 1 tiers"):
        await process.make(_goal_of_one(), lines(window()), {})
    pid = process._process._pid
    process.stop()
    process.stop()
    assert not _runs_on(pid)


def _goal_of_one() -> Any:
    import msgspec

    return msgspec.structs.replace(GOAL, tiers=GOAL.tiers[:1])


def _runs_on(pid: int) -> bool:
    """After a while in which a killed process ends."""
    for _ in range(500):
        if not is_running(pid):
            return False
        time.sleep(0.01)
    return True
