"""Virtual time, and simulated processes that pause and die."""

import asyncio
import gc
import subprocess
import sys
import warnings
import weakref
from pathlib import Path

import pytest

from fault_simulation.isolation import _unheard
from fault_simulation.loop import SimulationStuck, VirtualLoop
from fault_simulation.node import Node


def test_time_jumps_to_the_next_timer() -> None:
    loop = VirtualLoop()
    order: list[tuple[float, str]] = []

    async def sleeper(name: str, duration_s: float) -> None:
        await asyncio.sleep(duration_s)
        order.append((loop.now_s, name))

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            for name, duration_s in (("c", 300.0), ("a", 1.0), ("b", 1.0)):
                tasks.create_task(sleeper(name, duration_s))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await asyncio.Event().wait()

    loop.run(main())
    assert order == [(1.0, "a"), (1.0, "b"), (300.0, "c")]
    assert loop.now_s == 302.5


def test_each_node_has_its_own_clock() -> None:
    loop = VirtualLoop()
    seen: list[float] = []

    async def work() -> None:
        seen.append(loop.time())
        loop.call_at(loop.time() + 2, lambda: seen.append(loop.time()))
        await asyncio.sleep(3)

    async def main() -> None:
        await loop.spawn(Node("far", 5000.0), work(), "work")

    loop.run(main())
    assert seen == [5000.0, 5002.0]
    assert loop.now_s == 3.0


def test_a_paused_node_runs_late_and_in_order() -> None:
    loop, node = VirtualLoop(), Node("node")
    seen: list[tuple[float, int]] = []

    async def work() -> None:
        for number in range(5):
            await asyncio.sleep(1)
            seen.append((loop.now_s, number))

    async def main() -> None:
        task = loop.spawn(node, work(), "work")
        await asyncio.sleep(1.5)
        loop.pause(node)
        await asyncio.sleep(10)
        assert seen == [(1.0, 0)]
        loop.resume(node)
        await task

    loop.run(main())
    assert seen == [(1.0, 0), (11.5, 1), (12.5, 2), (13.5, 3), (14.5, 4)]


def test_a_dead_node_runs_not_one_more_line() -> None:
    loop, node = VirtualLoop(), Node("node")
    seen: list[str] = []

    async def generator():  # type: ignore[no-untyped-def]
        try:
            while True:
                await asyncio.sleep(1)
                yield
        finally:
            seen.append("generator cleaned up")

    async def work() -> None:
        try:
            async for _ in generator():
                seen.append("worked")
        finally:
            seen.append("cleaned up")

    async def main() -> None:
        loop.spawn(node, work(), "work")
        await asyncio.sleep(1.5)
        loop.pause(node)
        await asyncio.sleep(1.5)
        loop.kill(node)
        await asyncio.sleep(5)
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "work" and task.done()]

    loop.run(main())
    assert seen == ["worked"]
    loop.close()
    assert not loop.findings


def test_what_nobody_hears_of_is_a_finding() -> None:
    loop, node = VirtualLoop(), Node("node")

    async def fail() -> None:
        raise ValueError("unheard")

    async def main() -> None:
        task = loop.spawn(node, fail(), "work")
        await asyncio.sleep(1)
        assert task.done()
        del task
        await asyncio.sleep(1)
        loop.call_in(node, 1.0, lambda: 1 / 0)
        await asyncio.sleep(2)

    loop.run(main())
    assert [(finding.node, finding.what) for finding in loop.findings] == [
        ("node", "NodeTask exception was never retrieved"),
        ("node", "a callback failed"),
    ]


@pytest.mark.slow
def test_deadlock_and_livelock_are_told() -> None:
    async def wait_for_ever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(SimulationStuck, match="wait_for_ever"):
        VirtualLoop().run(wait_for_ever())

    async def spin() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(SimulationStuck, match="livelock"):
        VirtualLoop().run(spin())

    async def late() -> None:
        await asyncio.sleep(100)

    with pytest.raises(TimeoutError, match="late"):
        VirtualLoop().run(late(), limit_s=50)


_SETS = """
import asyncio, random
from fault_simulation.isolation import _unheard
from fault_simulation.loop import VirtualLoop
loop, order = VirtualLoop(), []
async def main():
    ballast = [object() for _ in range(random.SystemRandom().randrange(50_000))]
    tasks = {asyncio.create_task(asyncio.sleep(1, number)) for number in range(100)}
    futures = {loop.create_future() for _ in range(100)}
    done, _ = await asyncio.wait(tasks)
    order.extend(task.result() for task in done)
    order.extend(hash(future) for future in futures)
loop.run(main())
print(order)
"""


@pytest.mark.process
def test_sets_of_tasks_and_futures_have_the_same_order_in_every_process() -> None:
    root = Path(__file__).resolve().parents[3]
    outputs = {
        subprocess.run([sys.executable, "-c", _SETS], cwd=root, check=True, capture_output=True).stdout
        for _ in range(3)
    }
    assert len(outputs) == 1


def test_a_loop_that_is_closed_goes_with_all_that_ran_there() -> None:
    async def wait(loop: VirtualLoop) -> None:
        try:
            await asyncio.sleep(1000.0)
        finally:
            await asyncio.gather(asyncio.sleep(1.0, loop))  # as a supervisor does that ends its processes

    async def main(loop: VirtualLoop) -> None:
        loop.spawn(loop.world, wait(loop), "wait")
        await asyncio.sleep(1.0)

    def closed() -> weakref.ref[VirtualLoop]:
        loop = VirtualLoop()
        loop.run(main(loop))
        loop.close()
        return weakref.ref(loop)

    with _unheard():
        was_there = closed()
        gc.collect()
    assert was_there() is None


def test_what_clean_up_starts_at_the_end_is_ended_too() -> None:
    loop = VirtualLoop()
    begun = []

    async def waits() -> None:
        begun.append(0)
        try:
            await asyncio.sleep(3600)
        finally:
            kept.append(asyncio.get_running_loop().create_task(more(), name="clean-up"))

    async def more() -> None:
        raise AssertionError("nothing runs any more")

    async def main() -> None:
        kept.append(loop.spawn(loop.world, waits(), "waits"))
        await asyncio.sleep(1)

    kept: list[asyncio.Task[None]] = []
    loop.run(main())
    loop.close()
    assert begun == [0]
    assert len(kept) == 2
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        kept.clear()
        gc.collect()
    assert not complaints
