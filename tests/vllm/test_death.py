"""Engines that die, and workers that die before their engines."""

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from controlplane.model.request import EngineRequest, SamplingParams, StepOutput
from engine_worker.engines.vllm.engine import VllmEngine
from engine_worker.engines.vllm.settings import VllmSettings
from mesh.errors import EngineFailed
from tests.in_time import still, within

pytestmark = pytest.mark.vllm

LONG = SamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True)


@pytest_asyncio.fixture
async def engine(tiny_llama: Path) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(VllmSettings(model_path=str(tiny_llama), dtype="float32"))
    await engine.start()
    yield engine
    await engine.stop()


async def test_the_core_s_death_surfaces_within_a_second(engine: VllmEngine) -> None:
    engine.submit(EngineRequest("running", (5, 6, 7), LONG))
    outputs = engine.outputs()
    await anext(outputs)
    core = _core(engine)
    core.kill()
    killed_s = time.monotonic()
    with pytest.raises(EngineFailed):
        await _read(outputs)
    took_s = time.monotonic() - killed_s
    print(f"death surfaced after {1e3 * took_s:.0f} ms")
    within(took_s, 10.0, "a death is told")
    with pytest.raises(EngineFailed):
        engine.submit(EngineRequest("late", (5, 6, 7), LONG))
    await engine.stop()
    assert not core.is_running()


async def test_an_idle_core_s_death_surfaces_too(engine: VllmEngine) -> None:
    _core(engine).kill()
    async with asyncio.timeout(3.0):
        with pytest.raises(EngineFailed):
            await _read(engine.outputs())


@pytest.fixture
def short_path() -> Iterator[str]:
    """A folder in which vLLM's sockets, 37 characters more, have paths that are short enough (107)."""
    with tempfile.TemporaryDirectory(prefix="death-", dir="/tmp") as folder:
        yield folder


async def test_nothing_is_left_by_a_stop_or_by_a_killed_worker(tiny_llama: Path, short_path: str) -> None:
    worker = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.vllm.engine_process",
        str(tiny_llama),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "TMPDIR": short_path},
    )
    try:
        stopped = await _fact(worker, "left")
        assert len(stopped["cores"]) == 1
        assert stopped["left"] == []
        assert stopped["reasons"] == ["abort"]
        assert (await _fact(worker, "files"))["files"] == []
        cores = [psutil.Process(pid) for pid in (await _fact(worker, "cores"))["cores"]]
        assert len(cores) == 1
        worker.send_signal(signal.SIGKILL)
        await worker.wait()
        _, alive = await asyncio.to_thread(psutil.wait_procs, cores, timeout=3.0)
        still(not alive, "no engine core is left once its worker has been gone for three seconds")
    finally:
        if worker.returncode is None:
            worker.kill()
            await worker.wait()


async def test_a_directory_without_a_model_fails_at_once(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match=r"config\.json"):
        VllmEngine(VllmSettings(model_path=str(tmp_path)))


async def test_a_model_that_vllm_cannot_load_fails_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 512}))
    others = _cores()  # of engines that other tests keep
    engine = VllmEngine(VllmSettings(model_path=str(tmp_path)))
    with pytest.raises(EngineFailed, match=str(tmp_path)):
        await engine.start()
    await engine.stop()
    assert _cores() == others


async def _read(outputs: AsyncIterator[StepOutput]) -> None:
    async for _ in outputs:
        continue


def _core(engine: VllmEngine) -> psutil.Process:
    (core,) = engine._core._processes  # type: ignore[union-attr]
    return psutil.Process(core.pid)


def _cores() -> list[psutil.Process]:
    """Engine cores of this process; a whole test run has other children too. vLLM renames the process if it can."""
    marks = ("multiprocessing.spawn", "EngineCore")
    return [child for child in psutil.Process().children() if any(mark in str(child.cmdline()) for mark in marks)]


async def _fact(worker: asyncio.subprocess.Process, key: str) -> dict[str, list[object]]:
    """The next line of the worker's that tells `key`."""
    assert worker.stdout is not None
    async with asyncio.timeout(120.0):
        async for line in worker.stdout:
            if line.startswith(b"{"):
                facts: dict[str, list[object]] = json.loads(line)
                assert key in facts, facts
                return facts
    raise AssertionError(f"the worker ended before it told {key}")
