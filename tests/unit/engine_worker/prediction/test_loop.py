"""The worker's prediction loop, with an engine and a predictor that the test plays."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np
import pytest

from controlplane.model.request import FinishReason, StepOutput, TokenDelta
from engine_worker.engines.predicted_lengths import PredictedLength
from engine_worker.prediction.loop import PredictionLoop
from engine_worker.prediction.predictor_link import Answer, Predictor, StateBatch
from engine_worker.prediction.state import LengthSource, PredictionState
from engine_worker.request_table import RequestTable
from mesh.errors import DeadlineExceeded, PeerUnavailable
from mesh.mailbox import Mailbox
from tests.still_clock import StillClock
from tests.unit.engine_worker.prediction.state_engine import StateEngine
from tests.unit.engine_worker.worker.fake_engine import FakeEngine, make_request

pytestmark = pytest.mark.live

MODEL_LEN = 1024


class ForetellingEngine(FakeEngine):
    """Tells the lengths that the test gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.told: Mailbox[tuple[PredictedLength, ...]] = Mailbox()

    def enable_length_predictions(self, every_steps: int) -> bool:
        return every_steps > 0

    def length_predictions(self) -> AsyncIterator[tuple[PredictedLength, ...]]:
        return self.told.read()


class FakeLink:
    """Answers what `answer` makes of a batch."""

    def __init__(self, answer: Callable[[StateBatch], Awaitable[Answer]]) -> None:
        self.answer = answer
        self.batches: list[StateBatch] = []

    async def predict(self, batch: StateBatch) -> Answer:
        self.batches.append(batch)
        return await self.answer(batch)

    async def who_answers(self) -> Predictor:
        raise PeerUnavailable("no length predictor is in the mesh")

    async def close(self) -> None:
        """Nothing to free."""


class Run:
    """A loop over a table, running."""

    def __init__(self, engine: FakeEngine, link: FakeLink, every_steps: int = 20) -> None:
        self.table = RequestTable()
        self.state = PredictionState(every_steps)
        self.loop = PredictionLoop(engine, self.table, link, self.state, MODEL_LEN, StillClock().now_s)  # type: ignore[arg-type]
        self.task = asyncio.create_task(self.loop.run())

    def admit(self, request_id: str, *, prompt: int = 3, max_tokens: int = 500) -> None:
        request = make_request(request_id, prompt=prompt, max_tokens=max_tokens)
        self.table.admit(request, stream_id=1, frontend_id="f", now_s=0.0)

    def generate(self, request_id: str, tokens: int, finish: FinishReason | None = None) -> None:
        tracked = self.table.find(request_id)
        assert tracked is not None
        delta = TokenDelta(request_id, len(tracked.emitted_token_ids), tuple(range(tokens)), finish_reason=finish)
        self.table.route(StepOutput((delta,)))

    def remaining(self, request_id: str) -> int | None:
        tracked = self.table.find(request_id)
        assert tracked is not None
        return tracked.remaining_tokens

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110  many small things happen, none of which can be awaited
                await asyncio.sleep(0)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.loop.stop()


async def twice_the_context(batch: StateBatch) -> Answer:
    rows = np.frombuffer(batch.states, "<f4").reshape(len(batch.request_ids), batch.hidden_size)
    return Answer([2 * float(row[0]) for row in rows], "m@1")


async def test_a_prediction_counts_from_where_its_state_was_taken() -> None:
    engine, link = StateEngine(), FakeLink(twice_the_context)
    run = Run(engine, link)
    for name, prompt in (("a", 3), ("b", 10)):
        run.admit(name, prompt=prompt)
        run.generate(name, 5)
    engine.tell(a=8, gone=99, b=13)
    await run.until(lambda: run.state.predictions_total == 2)
    assert engine.every_steps == 20
    (batch,) = link.batches
    # All requests in one call, those that are not here left out; b has generated two more since.
    assert batch.request_ids == ("a", "b")
    assert batch.prompt_tokens == (3, 10)
    assert batch.generated_tokens == (5, 3)
    assert run.remaining("a") == 16
    assert run.remaining("b") == 26 - 2
    run.generate("a", 4)
    assert run.remaining("a") == 12
    run.generate("a", 20)
    assert run.remaining("a") == 0
    assert run.state.source is LengthSource.LLM_NATIVE
    assert run.state.artefact == "m@1"
    await run.stop()


async def test_predictions_keep_to_the_limits_of_request_and_model() -> None:
    async def endless(batch: StateBatch) -> Answer:
        return Answer([float("inf"), 1e30, 1e30], "m@1")

    engine = StateEngine()
    run = Run(engine, FakeLink(endless))
    run.admit("broken")
    run.admit("short", max_tokens=30)
    run.admit("long", prompt=1000)
    for name in ("broken", "short", "long"):
        run.generate(name, 10)
    engine.tell(broken=13, short=13, long=1010)
    await run.until(lambda: run.state.predictions_total == 2)
    assert run.remaining("broken") is None
    assert run.remaining("short") == 20
    assert run.remaining("long") == MODEL_LEN - 1010
    await run.stop()


async def test_states_that_wait_are_overtaken_and_the_engine_is_not_held_up() -> None:
    held = asyncio.Event()

    async def slow(batch: StateBatch) -> Answer:
        await held.wait()
        return await twice_the_context(batch)

    engine, link = StateEngine(), FakeLink(slow)
    run = Run(engine, link)
    run.admit("a")
    run.generate("a", 10)
    engine.tell(a=4)
    await run.until(lambda: len(link.batches) == 1)
    for context in (5, 6, 7):
        engine.tell(a=context)
    await run.until(lambda: run.state.batches_total == 4)
    held.set()
    await run.until(lambda: run.state.predictions_total == 2)
    assert [batch.generated_tokens for batch in link.batches] == [(1,), (4,)]
    assert run.state.skipped_batches_total == 2
    await run.stop()


async def test_without_an_answer_the_fallback_stands_in_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    async def silent(_batch: StateBatch) -> Answer:
        raise DeadlineExceeded("the predictor did not answer")

    engine, link = StateEngine(), FakeLink(silent)
    run = Run(engine, link)
    for name in ("a", "b", "c", "d"):
        run.admit(name)
    for _ in range(3):
        run.generate("b", 5)
    run.generate("b", 15, FinishReason.STOP)
    run.generate("c", 40, FinishReason.LENGTH)
    run.generate("d", 1000, FinishReason.ABORT)
    run.generate("a", 5)
    for _ in range(2):
        engine.tell(a=8)
        await run.until(lambda: run.state.fallback_predictions_total == run.state.failures_total > 0)
    # 30 and 40 tokens: 30 to come on average after 5; whom somebody took back tells nothing.
    assert run.remaining("a") == 30
    assert run.state.source is LengthSource.MEAN_RESIDUAL
    assert "did not answer" in run.state.reason
    said = [record for record in caplog.records if "did not answer" in record.__dict__.get("reason", "")]
    assert len(said) == 1, "said once, not at every failure"
    link.answer = twice_the_context
    engine.tell(a=8)
    await run.until(lambda: run.state.source is LengthSource.LLM_NATIVE)
    assert run.state.reason == ""
    assert run.remaining("a") == 16
    await run.stop()


async def nobody(_batch: StateBatch) -> Answer:
    raise PeerUnavailable("no length predictor is in the mesh")


async def test_an_engine_that_gives_no_states_is_named() -> None:
    run = Run(StateEngine(reason="the model has 2 heads"), FakeLink(nobody))
    run.admit("a")
    run.generate("a", 7, FinishReason.STOP)
    run.admit("b")
    run.generate("b", 2)
    await run.until(lambda: run.state.source is LengthSource.MEAN_RESIDUAL)
    assert run.state.reason == "the model has 2 heads"
    await run.until(lambda: run.remaining("b") is not None)
    assert run.remaining("b") == 5
    await run.stop()


async def test_an_engine_without_either_falls_back() -> None:
    run = Run(FakeEngine(), FakeLink(twice_the_context))
    await run.until(lambda: run.state.source is LengthSource.MEAN_RESIDUAL)
    assert "neither hidden states nor lengths" in run.state.reason
    await run.stop()


async def test_without_states_a_predictor_is_told_counts_repetition_and_what_has_ended() -> None:
    async def learnt(batch: StateBatch) -> Answer:
        return Answer([70.0, math.nan][: len(batch.request_ids)], "m@learnt", is_learnt=True)

    link = FakeLink(nobody)
    run = Run(FakeEngine(), link)
    for name in ("a", "b", "c"):
        run.admit(name)
    run.generate("c", 12, FinishReason.STOP)
    for _ in range(4):
        run.generate("a", 5)
    run.generate("b", 3)
    await run.until(lambda: run.state.failures_total == 1)
    # What has ended is not lost with the call.
    link.answer = learnt
    await run.until(lambda: run.state.predictions_total == 1)
    batch = link.batches[-1]
    assert (batch.hidden_size, batch.request_ids, batch.generated_tokens) == (0, ("a", "b"), (20, 3))
    assert batch.ended == (("c", 12),)
    assert batch.repetition.period_tokens.tolist() == [5, 0]
    assert batch.repetition.repeated_tokens.tolist() == [15, 0]
    assert run.remaining("a") == 70
    assert run.state.source is LengthSource.LEARNT
    await run.stop()


async def test_nothing_is_predicted_where_it_is_turned_off() -> None:
    engine = StateEngine()
    run = Run(engine, FakeLink(twice_the_context), every_steps=0)
    await run.task
    assert engine.every_steps == 0
    assert run.state.source is LengthSource.OFF
    await run.stop()


async def test_a_simulated_engine_needs_no_predictor() -> None:
    engine, link = ForetellingEngine(), FakeLink(twice_the_context)
    run = Run(engine, link)
    run.admit("a")
    run.generate("a", 6)
    engine.told.put((PredictedLength("a", 4, 50), PredictedLength("gone", 1, 1)))
    await run.until(lambda: run.state.predictions_total == 1)
    assert run.remaining("a") == 48
    assert run.state.source is LengthSource.SIMULATED
    assert not link.batches
    await run.stop()


async def test_an_answer_that_goes_round_in_circles_is_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = StateEngine()
    run = Run(engine, FakeLink(twice_the_context))
    for name in ("round", "straight"):
        run.admit(name)
    for _ in range(30):
        run.generate("round", 5)
    run.generate("straight", 150)
    for total in (2, 4):
        engine.tell(round=153, straight=153)
        await run.until(lambda total=total: run.state.predictions_total == total)  # type: ignore[misc]
    assert run.state.looping == {"round"}
    assert run.state.loops_total == 1
    (said,) = [record.__dict__ for record in caplog.records if "circles" in record.message]
    assert (said["request_id"], said["period_tokens"]) == ("round", 5)
    run.generate("round", 1, FinishReason.STOP)
    engine.tell(straight=153)
    await run.until(lambda: run.state.predictions_total == 5)
    assert run.state.looping == frozenset()
    await run.stop()
