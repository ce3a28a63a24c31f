"""Judges of cascades that change while they are asked."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from controlplane.model.cascade_record import CascadeRecord
from mesh.errors import ConfigurationError, JudgeUnavailable
from mesh.runtime import system_runtime
from mesh.store import StateStore, open_store
from mesh.tasks import TaskSet
from services.cascade.cascades import Cascades
from services.cascade.judges.chain import JudgeChain
from services.cascade.judges.interface import JudgedAnswer
from services.cascade.metrics import CascadeMetrics

pytestmark = pytest.mark.live

ANSWER = JudgedAnswer("What is 2 + 2?", "4", "small")
RECORD = CascadeRecord("both", ("small", "large"), (70.0,), judges=("slow",))


class SlowJudge:
    """Gives its score when it is told to; like a connection, it is of no use once it is closed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked, self.told, self.closed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def score(self, judged: JudgedAnswer) -> float:
        if self.closed.is_set():
            raise RuntimeError("client has been closed")
        self.asked.set()
        told, closed = asyncio.create_task(self.told.wait()), asyncio.create_task(self.closed.wait())
        await asyncio.wait((told, closed), return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        closed.cancel()
        if self.closed.is_set():
            raise JudgeUnavailable("ReadError")
        return 80.0

    async def close(self) -> None:
        self.closed.set()


class Followed:
    """Cascades over a store."""

    def __init__(self, store: StateStore) -> None:
        self.made: list[SlowJudge] = []
        self._store = store
        self._tasks = TaskSet("test")
        samplers: Any = self
        self.sampled: list[JudgeChain] = []
        self.cascades = Cascades(
            store, self._make, 5.0, lambda: 0.0, self._tasks, samplers, CascadeMetrics(CollectorRegistry())
        )
        self._tasks.spawn(self.cascades.follow(), name="follow")

    def _make(self, text: str, _rubric: str) -> SlowJudge:
        self.made.append(SlowJudge(text))
        return self.made[-1]

    def begin(self, record: CascadeRecord, chain: JudgeChain, labels: JudgeChain | None = None) -> None:
        self.sampled.append(chain)

    def end(self, name: str) -> None:
        pass

    async def set(self, record: CascadeRecord) -> None:
        await self._store.put(record.key, msgspec.json.encode(record))
        await self.until(lambda: record in self.cascades.records)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5.0):
            while not condition():  # noqa: ASYNC110 - what follows the store has no event
                await asyncio.sleep(0.001)

    async def stop(self) -> None:
        await self._tasks.cancel()
        await self.cascades.close()


@pytest.fixture
async def followed() -> AsyncIterator[Followed]:
    store = open_store("embedded:", system_runtime())
    followed = Followed(store)
    try:
        yield followed
    finally:
        await followed.stop()
        await store.close()


async def begun(followed: Followed) -> tuple[JudgeChain, SlowJudge, asyncio.Task[Any]]:
    """A judgement under way."""
    await followed.set(RECORD)
    chain = followed.cascades.chain(RECORD)
    judging = asyncio.create_task(chain.judge(ANSWER))
    await followed.until(lambda: any(judge.asked.is_set() for judge in followed.made))
    return chain, next(judge for judge in followed.made if judge.asked.is_set()), judging


async def test_new_thresholds_leave_the_judges_alone(followed: Followed) -> None:
    chain, judge, judging = await begun(followed)
    raised = msgspec.structs.replace(RECORD, thresholds=(80.0,), plan_revision=7)
    await followed.set(raised)
    assert followed.cascades.chain(raised) is chain, "so that a judge that rests goes on resting, too"
    assert followed.sampled == [chain, chain]
    judge.told.set()
    assert (await judging).score == 80.0
    assert (await chain.judge(ANSWER)).score == 80.0, "for a sampler that began with it"
    assert not judge.closed.is_set()


@pytest.mark.parametrize("removed", [False, True])
async def test_other_judges_take_over_when_the_former_ones_have_finished(followed: Followed, removed: bool) -> None:
    chain, judge, judging = await begun(followed)
    if removed:
        await followed._store.delete(RECORD.key)
        await followed.until(lambda: not followed.cascades.records)
    else:
        other = msgspec.structs.replace(RECORD, judges=("other",))
        await followed.set(other)
        assert followed.cascades.chain(other) is not chain
    with pytest.raises(JudgeUnavailable, match="other judges"):
        await chain.judge(ANSWER)
    assert not judge.closed.is_set()
    judge.told.set()
    assert (await judging).score == 80.0
    await asyncio.wait_for(judge.closed.wait(), 5.0)


async def test_judges_that_never_finish_are_closed_all_the_same(followed: Followed) -> None:
    chain, judge, judging = await begun(followed)
    await followed.set(msgspec.structs.replace(RECORD, judges=("other",)))
    await followed.stop()
    assert judge.closed.is_set()
    with pytest.raises(JudgeUnavailable, match="ReadError"):
        await judging
    with pytest.raises(JudgeUnavailable):
        await chain.judge(ANSWER)


async def test_the_wait_for_judges_is_bounded_by_their_deadlines() -> None:
    class DeafJudge(SlowJudge):
        async def score(self, judged: JudgedAnswer) -> float:
            while not self.closed.is_set():
                try:
                    await self.closed.wait()
                except asyncio.CancelledError:
                    continue
            raise JudgeUnavailable("closed")

    judge = DeafJudge("deaf")
    chain = JudgeChain([judge], 0.02, lambda: 0.0)
    judging = asyncio.create_task(chain.judge(ANSWER))
    await asyncio.sleep(0)
    await asyncio.wait_for(chain.close_when_unused(), 5.0)
    assert judge.closed.is_set()
    with pytest.raises(JudgeUnavailable):
        await judging


async def test_a_preference_judges_no_answers_that_a_client_waits_for(followed: Followed) -> None:
    followed.cascades.check(msgspec.structs.replace(RECORD, label="preference:model:large"))
    with pytest.raises(ConfigurationError, match=r"it can be the label \(--label\)"):
        followed.cascades.check(msgspec.structs.replace(RECORD, judges=("preference:model:large",)))
    with pytest.raises(ConfigurationError, match="cannot judge its own answers"):
        followed.cascades.check(msgspec.structs.replace(RECORD, label="model:both"))
