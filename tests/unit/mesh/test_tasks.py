import asyncio
import logging

import pytest

from mesh.tasks import TaskSet


async def test_a_dead_task_is_logged_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def dies() -> None:
        raise RuntimeError("the reason")

    told: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    tasks = TaskSet("test")
    with caplog.at_level(logging.ERROR):
        tasks.spawn(dies(), name="one", on_error=told.set_result)
        assert str(await told) == "the reason"
    assert "a background task died" in caplog.text
    assert len(tasks) == 0


async def test_cancel_waits_until_all_are_gone() -> None:
    cleaned: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append("done")

    tasks = TaskSet("test")
    for number in range(3):
        tasks.spawn(waits(), name=str(number))
    await asyncio.sleep(0)
    await tasks.cancel()
    assert cleaned == ["done"] * 3
    assert len(tasks) == 0


async def test_all_can_be_waited_for_those_too_that_begin_meanwhile() -> None:
    tasks, went = TaskSet("test"), list[str]()

    async def goes(name: str) -> None:
        await asyncio.sleep(0)
        went.append(name)
        if name == "first":
            tasks.spawn(goes("second"), name="second")

    tasks.spawn(goes("first"), name="first")
    await tasks.ended()
    assert went == ["first", "second"]
    await tasks.ended()


async def test_a_task_may_cancel_its_own_set() -> None:
    tasks = TaskSet("test")
    ended = asyncio.Event()

    async def ends_all() -> None:
        await tasks.cancel()
        ended.set()

    tasks.spawn(asyncio.Event().wait(), name="other")
    tasks.spawn(ends_all(), name="own")
    await ended.wait()
