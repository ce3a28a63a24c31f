"""Requests whose logprobs an engine would mix up are never in its batch together, and none waits for ever."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.request import EngineRequest, SamplingParams
from engine_worker.engines.vllm.logprob_turns import LogprobTurns
from engine_worker.engines.vllm.running import EngineRequestState

NAMED = SamplingParams(max_tokens=1, logprobs=1, logprob_token_ids=(5, 6))
RIVALS = SamplingParams(max_tokens=1, logprobs=2)
CHOSEN = SamplingParams(max_tokens=1, logprobs=0)
NOTHING = SamplingParams(max_tokens=1)
KINDS = {"named": NAMED, "rivals": RIVALS, "chosen": CHOSEN, "nothing": NOTHING}


class Batch:
    """What runs in an engine; each request runs until it is ended."""

    def __init__(self, *, is_needed: bool = True) -> None:
        self.turns = LogprobTurns(is_needed=is_needed)
        self.running: dict[int, str] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self._states: dict[int, EngineRequestState] = {}
        self._ends: dict[int, asyncio.Event] = {}

    def begin(self, kind: str) -> int:
        number = len(self.tasks)
        self._ends[number] = asyncio.Event()
        self._states[number] = EngineRequestState(EngineRequest(str(number), (1,), KINDS[kind]), offset=0)
        self.tasks[number] = asyncio.create_task(self._run(number, kind))
        return number

    def end(self, number: int) -> None:
        self._ends[number].set()

    def abort(self, number: int) -> None:
        self._states[number].is_aborted = True
        self.turns.aborted(self._states[number])

    async def _run(self, number: int, kind: str) -> None:
        async with self.turns.turn(self._states[number]):
            if self._states[number].is_aborted:
                return
            self.running[number] = kind
            try:
                await self._ends[number].wait()
            finally:
                del self.running[number]

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        self.turns.validate()
        assert not {"named", "rivals"} <= set(self.running.values()), self.running


@pytest.mark.asyncio
async def test_named_and_rivals_take_turns_in_the_order_in_which_they_came_and_all_others_run() -> None:
    batch = Batch()
    first, second = batch.begin("rivals"), batch.begin("rivals")
    named = batch.begin("named")
    late = batch.begin("rivals")
    chosen, nothing = batch.begin("chosen"), batch.begin("nothing")
    await batch.settle()
    assert set(batch.running) == {first, second, chosen, nothing}, "nobody overtakes one that waits"
    batch.end(first)
    await batch.settle()
    assert named not in batch.running
    batch.end(second)
    await batch.settle()
    assert set(batch.running) == {named, chosen, nothing}
    batch.end(named)
    await batch.settle()
    assert late in batch.running
    for number in (late, chosen, nothing):
        batch.end(number)
    await batch.settle()
    assert not batch.running


@pytest.mark.asyncio
async def test_who_was_taken_back_passes_at_once() -> None:
    batch = Batch()
    first, named, late = batch.begin("rivals"), batch.begin("named"), batch.begin("rivals")
    await batch.settle()
    batch.abort(named)
    at_once = batch.begin("named")
    batch.abort(at_once)
    await batch.settle()
    assert batch.tasks[named].done()
    assert batch.tasks[at_once].done(), "it had not even begun to wait"
    assert set(batch.running) == {first, late}, "nobody is before it any more"
    for number in (first, late):
        batch.end(number)
    await batch.settle()
    assert not batch.running


@pytest.mark.asyncio
async def test_an_engine_that_mixes_nothing_has_no_turns() -> None:
    batch = Batch(is_needed=False)
    numbers = [batch.begin(kind) for kind in KINDS]
    for _ in range(5):
        await asyncio.sleep(0)
    assert set(batch.running) == set(numbers)
    for number in numbers:
        batch.end(number)
    await asyncio.gather(*batch.tasks.values())


STEPS = st.one_of(
    st.sampled_from(sorted(KINDS)),
    st.tuples(st.sampled_from(("end", "abort", "cancel")), st.integers(0, 20)),
)


@given(st.lists(STEPS, max_size=30), st.data())
def test_whatever_comes_ends_and_is_taken_back(steps: list[str | tuple[str, int]], data: st.DataObject) -> None:
    at_once = data.draw(st.lists(st.booleans(), min_size=len(steps), max_size=len(steps)))

    async def run() -> None:
        batch = Batch()
        for step, is_at_once in zip(steps, at_once, strict=True):
            if isinstance(step, str):
                batch.begin(step)
            elif batch.tasks:
                what, number = step[0], step[1] % len(batch.tasks)
                if what == "end":
                    batch.end(number)
                elif what == "cancel":
                    batch.tasks[number].cancel()
                elif number not in batch.running:
                    batch.abort(number)
            if not is_at_once:
                await batch.settle()
        for number in batch.tasks:
            batch.end(number)
        for _ in batch.tasks:  # one turn after the other
            await batch.settle()
        assert all(task.done() for task in batch.tasks.values())

    asyncio.run(run())
