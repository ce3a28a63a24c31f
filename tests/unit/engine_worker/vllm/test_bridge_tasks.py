"""What a bridge leaves behind when it stops."""

import asyncio
import gc
import logging
import warnings

import pytest

from engine_worker.engines.vllm.connector.bridge_tasks import BridgeTasks
from engine_worker.prefix_pull.outcome import or_error
from mesh.errors import EngineFailed


async def test_what_a_cancelled_command_still_says_is_cancelled_too() -> None:
    tasks, said = BridgeTasks(), asyncio.Event()

    async def command() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            tasks.spawn(said.wait())

    tasks.spawn(command())
    await asyncio.sleep(0)
    await tasks.cancel()
    assert not list(tasks)


async def test_what_fails_is_told_unless_it_is_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    async def fails(error: Exception) -> None:
        raise error

    tasks = BridgeTasks()
    with caplog.at_level(logging.ERROR):
        spawned = [tasks.spawn(fails(error)) for error in (EngineFailed("an answer"), RuntimeError("a bug"))]
        await asyncio.gather(*spawned, return_exceptions=True)
        await asyncio.sleep(0)
    assert [record.exc_info[1].args for record in caplog.records if record.exc_info] == [("a bug",)]  # type: ignore[union-attr]


async def test_what_is_cancelled_before_it_begins_leaves_nothing_that_nobody_awaits() -> None:
    begun = []

    async def call() -> None:
        begun.append(True)

    tasks = BridgeTasks()
    with warnings.catch_warnings(record=True) as left:
        warnings.simplefilter("always")
        tasks.spawn(call())
        tasks.spawn(or_error(call))
        await tasks.cancel()
        await asyncio.sleep(0)  # whoever waited lets go of them
        gc.collect()
    assert not begun
    # Other warnings may be of what tests before have left, such as an event loop that nobody closed.
    assert [told for told in (str(warning.message) for warning in left) if "never awaited" in told] == []
