"""Keeps the remaining length of every running request up to date."""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from controlplane.prediction.length_fallback import MeanResidual
from controlplane.prediction.repetition import WINDOW_TOKENS, Repetition, repetition
from engine_worker.engines.hidden_state_source import HiddenStates, HiddenStateSource, has_hidden_states
from engine_worker.engines.interface import Engine
from engine_worker.engines.predicted_lengths import LengthPredictingEngine, predicts_lengths
from engine_worker.prediction.predictor_link import PredictorLink, StateBatch
from engine_worker.prediction.state import PredictionState
from engine_worker.request_table import RequestTable, TrackedRequest
from mesh.errors import EngineError, PenstockError
from mesh.tasks import TaskSet

FALLBACK_S: Final = 0.5
"""How often the fallback looks at the requests where the engine tells nothing."""
PROBE_S: Final = 2.0
"""How often a predictor is looked for while there is nothing to ask it."""
MAX_TOKENS: Final = 1 << 30
MOST_ENDED: Final = 4096
"""Ended requests that wait to be told to a predictor; of more the oldest are dropped."""
LOOP_TOKENS: Final = 128
"""An answer whose last so many tokens each repeat the one a cycle before goes round in circles."""
MOST_COUNTED: Final = 4096
"""Requests in one call; a predictor takes no more."""


class PredictionLoop:
    """One for each worker. Predictions go into the request table."""

    def __init__(
        self,
        engine: Engine,
        table: RequestTable,
        link: PredictorLink,
        state: PredictionState,
        max_model_len: int,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._table = table
        self._link = link
        self._max_model_len = max_model_len
        self._clock = clock
        self._residual = MeanResidual()
        self._waiting: HiddenStates | None = None
        self._tasks = TaskSet("prediction")
        self._call: asyncio.Task[None] | None = None
        self.state = state
        self._ended: deque[tuple[str, int]] = deque(maxlen=MOST_ENDED)
        table.on_end = self._note_end

    async def run(self) -> None:
        """Predict until cancelled. An engine that dies is others' affair."""
        if not self.state.every_steps:
            return
        try:
            if predicts_lengths(self._engine) and self._engine.enable_length_predictions(self.state.every_steps):
                await self._follow_engine_lengths(self._engine)
            elif has_hidden_states(self._engine):
                await self._take_states(self._engine)
            else:
                await self._ask_without_states("the engine tells neither hidden states nor lengths")
        except EngineError as error:
            await self._fall_back_forever(str(error))

    async def stop(self) -> None:
        """End the call that is under way, and free the channel."""
        await self._tasks.cancel()
        await self._link.close()

    async def _follow_engine_lengths(self, engine: LengthPredictingEngine) -> None:
        self.state.predicted_by_engine()
        async for lengths in engine.length_predictions():
            self.state.batches_total += 1
            for length in lengths:
                self._predicted(length.request_id, length.generated_tokens, length.remaining_tokens)

    async def _take_states(self, engine: HiddenStateSource) -> None:
        reason = await engine.capture_hidden_states(self.state.every_steps)
        if reason:
            await self._ask_without_states(reason)
        self._tasks.spawn(self._probe(), name="probe")
        async for states in engine.hidden_states():
            self.state.batches_total += 1
            self.state.skipped_batches_total += self._waiting is not None
            self._waiting = states
            if self._call is None or self._call.done():
                self._call = self._tasks.spawn(self._ask(), name="ask")

    async def _probe(self) -> None:
        """Look for a predictor while no requests run, so that the state is known before they do."""
        while True:
            if not len(self._table):
                self.state.note_loops({})
                try:
                    predictor = await self._link.who_answers()
                    self.state.predicted_by(predictor.artefact, is_learnt=predictor.is_learnt)
                except PenstockError as error:
                    self.state.fall_back(str(error))
            await asyncio.sleep(PROBE_S)

    async def _ask(self) -> None:
        """One call at a time, with the newest states; the predictor has its deadline."""
        while (states := self._waiting) is not None:
            self._waiting = None
            batch = self._batch(states)
            if batch.request_ids:
                await self._predict(batch)

    async def _predict(self, batch: StateBatch, without_states: str = "") -> None:
        """One call; without an answer the fallback stands in. `without_states`: why the engine tells none."""
        started_s = self._clock()
        try:
            answer = await self._link.predict(batch)
        except PenstockError as error:
            self._ended.extendleft(reversed(batch.ended[: MOST_ENDED - len(self._ended)]))
            self.state.failures_total += 1
            self.state.fall_back(without_states or str(error))
            self._fall_back(self._table.live())
            return
        self.state.latency_ms = 1e3 * (self._clock() - started_s)
        self.state.predicted_by(answer.artefact, is_learnt=answer.is_learnt)
        lengths = zip(batch.request_ids, batch.generated_tokens, answer.remaining_tokens, answer.bands(), strict=True)
        for request_id, generated, remaining, band in lengths:
            # A broken model has broken states, and a predictor that knows nothing yet says so.
            if math.isfinite(remaining):
                self._predicted(request_id, generated, round(min(remaining, MAX_TOKENS)), band)

    async def _ask_without_states(self, reason: str) -> None:
        """Counts and repetition are known of every engine's requests."""
        self.state.fall_back(reason)
        while True:
            requests = [each for each in self._table.live() if each.state == "running" and each.emitted_token_ids]
            if requests:
                self.state.batches_total += 1
                await self._predict(self._counted(requests[:MOST_COUNTED]), reason)
            else:
                self.state.note_loops({})
            await asyncio.sleep(FALLBACK_S)

    def _counted(self, requests: Sequence[TrackedRequest]) -> StateBatch:
        return StateBatch(
            tuple(each.request.request_id for each in requests),
            tuple(len(each.request.prompt_token_ids) for each in requests),
            tuple(len(each.emitted_token_ids) for each in requests),
            0,
            b"",
            self._repetition(requests),
            self._take_ended(),
        )

    def _repetition(self, requests: Sequence[TrackedRequest]) -> Repetition:
        """Of all that decode, and those that loop noted."""
        found = repetition([each.emitted_token_ids[-WINDOW_TOKENS:] for each in requests])
        looping = found.repeated_tokens >= LOOP_TOKENS
        ids = (each.request.request_id for each in requests)
        periods = zip(ids, looping.tolist(), found.period_tokens.tolist(), strict=True)
        self.state.note_loops({request_id: period for request_id, loops, period in periods if loops})
        return found

    def _take_ended(self) -> tuple[tuple[str, int], ...]:
        """Each is told once, where the call succeeds."""
        ended = tuple(self._ended)
        self._ended.clear()
        return ended

    def _note_end(self, request_id: str, output_tokens: int) -> None:
        self._residual.ended(output_tokens)
        self._ended.append((request_id, output_tokens))

    def _batch(self, states: HiddenStates) -> StateBatch:
        """Those of the states whose requests are still here."""
        width = states.hidden_size * 4
        ids, prompts, generated, rows = [], [], [], []
        found: list[TrackedRequest] = []
        for row, (request_id, context) in enumerate(zip(states.request_ids, states.context_tokens, strict=True)):
            tracked = self._table.find(request_id)
            if tracked is None or tracked.state != "running":
                continue
            prompt_tokens = len(tracked.request.prompt_token_ids)
            found.append(tracked)
            ids.append(request_id)
            prompts.append(prompt_tokens)
            generated.append(max(0, context - prompt_tokens))
            rows.append(states.states[row * width : (row + 1) * width])
        content = states.states if len(rows) == len(states.request_ids) else b"".join(rows)
        return StateBatch(
            tuple(ids),
            tuple(prompts),
            tuple(generated),
            states.hidden_size,
            content,
            self._repetition(found),
            self._take_ended() if ids else (),
        )

    def _predicted(
        self, request_id: str, generated_tokens: int, remaining_tokens: int, band: tuple[float, float] | None = None
    ) -> None:
        tracked = self._table.find(request_id)
        if tracked is not None:
            most = self._most(tracked, generated_tokens)
            is_known = band is not None and all(math.isfinite(each) for each in band)
            low, high = (min(round(each), most) for each in band) if band is not None and is_known else (0, 0)
            self._table.predicted(
                request_id, generated_tokens, min(remaining_tokens, most), (low, high) if is_known else None
            )
            self.state.predictions_total += 1

    def _most(self, tracked: TrackedRequest, generated_tokens: int) -> int:
        context_tokens = len(tracked.request.prompt_token_ids) + generated_tokens
        limit = tracked.request.sampling.max_tokens - generated_tokens
        return max(0, min(limit, self._max_model_len - context_tokens))

    async def _fall_back_forever(self, reason: str) -> None:
        self.state.fall_back(reason)
        while True:
            self._fall_back(self._table.live())
            await asyncio.sleep(FALLBACK_S)

    def _fall_back(self, requests: Iterable[TrackedRequest]) -> None:
        for tracked in requests:
            generated = len(tracked.emitted_token_ids)
            remaining = self._residual.remaining(generated) if generated else None
            if remaining is not None:
                most = self._most(tracked, generated)
                self._table.predicted(tracked.request.request_id, generated, min(remaining, most))
                self.state.fallback_predictions_total += 1
