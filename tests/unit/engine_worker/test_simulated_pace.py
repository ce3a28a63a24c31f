"""A simulated engine that runs slower or faster while it is asked to."""

import logging
import os
from pathlib import Path

import pytest

from controlplane.model.request import EngineRequest, SamplingParams
from engine_worker.engines.simulated import SimulatedEngine
from engine_worker.engines.simulated_pace import PaceFile
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig
from tests.unit.engine_worker.test_simulated_engine import FakeTime, ended

STEP_MS = 10.0
COST = LinearCost(fixed_ms=STEP_MS, prefill_token_ms=0, decode_request_ms=0, context_token_ms=0)


def write(path: Path, text: str, at_s: int) -> None:
    """As at a time of its own: two writes may come within what a file system tells apart."""
    path.write_text(text)
    os.utime(path, (at_s, at_s))


def test_the_file_may_come_change_and_go(tmp_path: Path) -> None:
    path = tmp_path / "pace"
    pace = PaceFile(str(path))
    assert pace() == 1.0
    write(path, "20\n", 1)
    assert pace() == 20.0
    write(path, "0.1", 2)
    assert pace() == 0.1
    path.unlink()
    assert pace() == 1.0
    write(path, "20", 1)
    assert pace() == 20.0


@pytest.mark.parametrize("text", ["", "fast", "0", "-2", "inf", "nan"])
def test_what_is_no_pace_changes_nothing_and_says_so_once(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pace"
    pace = PaceFile(str(path))
    write(path, "3", 1)
    assert pace() == 3.0
    write(path, text, 2)
    with caplog.at_level(logging.WARNING):
        assert (pace(), pace()) == (3.0, 3.0)
    assert [record.message for record in caplog.records] == ["this is no pace, so the last one stays"]


def test_what_cannot_be_read_changes_nothing_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "pace"
    pace = PaceFile(str(path))
    write(path, "3", 1)
    assert pace() == 3.0
    path.unlink()
    path.mkdir()
    with caplog.at_level(logging.WARNING):
        assert (pace(), pace()) == (3.0, 3.0)
    assert [record.message for record in caplog.records] == ["the pace cannot be read, so the last one stays"]


async def test_each_step_takes_as_long_as_the_pace_says_when_it_begins() -> None:
    time, paces = FakeTime(), iter([1.0, 20.0, 0.5])
    engine = SimulatedEngine(InstanceConfig(), COST, time, pace=lambda: next(paces))
    await engine.start()
    began_s = time.now_s()
    engine.submit(EngineRequest("a", (7, 8), SamplingParams(max_tokens=3, ignore_eos=True)))
    await ended(engine.outputs())
    assert time.now_s() - began_s == pytest.approx((1.0 + 20.0 + 0.5) * STEP_MS / 1000)
    assert engine.load().step_ms == pytest.approx(0.5 * STEP_MS, rel=0.01)
    await engine.stop()
