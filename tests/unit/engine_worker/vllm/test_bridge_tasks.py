"""What a bridge leaves behind when it stops."""

import asyncio
import logging

import pytest

from engine_worker.engines.vllm.connector.bridge_tasks import BridgeTasks
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
