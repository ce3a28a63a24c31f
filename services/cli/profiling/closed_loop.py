"""Keep a number of requests in flight on one instance for a while, and note what became of them."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import count

import msgspec
import numpy as np

from controlplane.model.step_sample import StepSample
from controlplane.planning.qoe import QoeSample
from controlplane.prediction.ttft import TtftPoint
from penstock.v1 import request_pb2
from services.cli.profiling.lifetimes import FinishedRequest, Lifetimes
from services.cli.profiling.plan import Configuration, ProfileBounds, draw_lengths
from services.cli.profiling.worker_session import WorkerSession
from simulator.traces.prompt import TokenRange

SETTLE_S = 0.3
"""After a configuration, until its last step samples have come."""


class Measured(msgspec.Struct, frozen=True):
    """All samples that one configuration gave."""

    configuration: Configuration
    steps: tuple[StepSample, ...]
    qoe: tuple[QoeSample, ...]
    ttft: tuple[TtftPoint, ...]
    """TTFT of prompts that the instance computed alone."""


class ClosedLoop:
    """Drives one instance, one configuration after the other."""

    def __init__(
        self, session: WorkerSession, bounds: ProfileBounds, tokens: TokenRange, clock: Callable[[], float]
    ) -> None:
        self._session = session
        self._bounds = bounds
        self._tokens = tokens
        self._clock = clock
        self._names = count()
        self._prompts = np.random.default_rng()

    async def warm_up(self) -> None:
        """One request that nobody looks at: the first of its kind may be slow."""
        await self._session.generate("warm-up", [self._tokens.first] * 16, 4)
        while not any(delta.finish_reason for delta in await self._session.next_deltas()):
            continue

    async def measure_in_turns(self, configurations: Sequence[Configuration], turns: int) -> list[Measured]:
        """What `measure` gives of each, its time cut into so many turns."""
        parts: dict[Configuration, list[Measured]] = {each: [] for each in configurations}
        for _ in range(turns):
            for configuration, measured in parts.items():
                measured.append(await self.measure(configuration, self._bounds.seconds / turns))
        return [
            Measured(
                configuration,
                tuple(step for part in measured for step in part.steps),
                tuple(sample for part in measured for sample in part.qoe),
                tuple(point for part in measured for point in part.ttft),
            )
            for configuration, measured in parts.items()
        ]

    async def measure(self, configuration: Configuration, seconds: float | None = None) -> Measured:
        """Run a configuration for its time (None: that of the bounds), then take back what still runs. Raises what the
        session raises."""
        rng = np.random.default_rng((self._bounds.seed, configuration.shortest_tokens, configuration.batch))
        steps: list[StepSample] = []
        watcher = asyncio.create_task(self._watch(steps))
        try:
            finished = await self._run(configuration, rng, seconds or self._bounds.seconds)
            await asyncio.sleep(SETTLE_S)
        finally:
            watcher.cancel()
            await asyncio.wait([watcher])
        if not watcher.cancelled() and (failure := watcher.exception()) is not None:
            raise failure
        alone = configuration.batch == 1
        points = tuple(TtftPoint(each.prompt_tokens, each.ttft_ms) for each in finished) if alone else ()
        return Measured(configuration, tuple(steps), tuple(each.qoe for each in finished), points)

    async def _watch(self, steps: list[StepSample]) -> None:
        async for sample in self._session.steps():
            steps.append(sample)

    async def _run(
        self, configuration: Configuration, rng: np.random.Generator, seconds: float
    ) -> list[FinishedRequest]:
        lifetimes, finished = Lifetimes(), list[FinishedRequest]()
        ends_s = self._clock() + seconds
        # The first is the longest, where there is one, and so is who takes its place.
        longest_id = await self._submit(configuration, rng, lifetimes, is_longest=configuration.longest_tokens > 0)
        for _ in range(configuration.batch - 1):
            await self._submit(configuration, rng, lifetimes)
        while self._clock() < ends_s or not finished:
            for delta in await self._session.next_deltas():
                ended = self._take(delta, lifetimes)
                if delta.finish_reason:
                    finished += [ended] if ended is not None else []
                    if configuration.longest_tokens and delta.request_id == longest_id:
                        longest_id = await self._submit(configuration, rng, lifetimes, is_longest=True)
                    else:
                        await self._submit(configuration, rng, lifetimes)
        await self._take_back(lifetimes)
        return finished

    async def _submit(
        self, configuration: Configuration, rng: np.random.Generator, lifetimes: Lifetimes, *, is_longest: bool = False
    ) -> str:
        """Send one request and tell its id."""
        lengths = draw_lengths(configuration, self._bounds, rng, is_longest=is_longest)
        request_id = f"profile-{next(self._names)}"
        # Drawn anew in every run: a prompt that the instance has cached would cost it nothing.
        prompt = self._prompts.integers(self._tokens.first, self._tokens.end, lengths.prompt_tokens).tolist()
        lifetimes.submitted(request_id, lengths.prompt_tokens, self._clock() * 1000)
        await self._session.generate(request_id, prompt, lengths.answer_tokens)
        return request_id

    def _take(self, delta: request_pb2.TokenDelta, lifetimes: Lifetimes) -> FinishedRequest | None:
        now_ms = self._clock() * 1000
        if delta.token_ids:
            lifetimes.produced(delta.request_id, len(delta.token_ids), now_ms)
        return lifetimes.ended(delta.request_id, now_ms) if delta.finish_reason else None

    async def _take_back(self, lifetimes: Lifetimes) -> None:
        for request_id in lifetimes.request_ids:
            await self._session.abort(request_id)
        while len(lifetimes):
            for delta in await self._session.next_deltas():
                self._take(delta, lifetimes)
