"""One cascade's windows, one after the other, reported to the planner."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from controlplane.model.cascade_record import CascadeRecord
from controlplane.planning.cascade.early_exit import ScoreBounds
from controlplane.planning.cascade.workload import WorkloadRequest
from controlplane.protocols.cascade.confidence import confidence_of
from mesh.errors import JudgeUnavailable, NoInstance, RpcError
from services.cascade.judges.chain import JudgeChain
from services.cascade.judges.confidence import ConfidenceJudge
from services.cascade.metrics import CascadeMetrics
from services.cascade.sampling.tiers import KnownAnswer, SampledRequest, TierClient
from services.cascade.sampling.window import SampleWindow, Window

log = logging.getLogger(__name__)

CONCURRENT = 2
"""Samples that are answered at the same time: clients' requests come first."""


@dataclass(frozen=True, slots=True)
class SampledWorkload:
    """A window's requests on every tier that has an instance."""

    record: CascadeRecord
    offered: int
    """All that came."""
    window_s: float
    requests: tuple[WorkloadRequest, ...]
    """The sampled requests; an empty window is reported too."""
    judge: str
    """Whose scores these are: those of other judges are left out, they do not compare."""

    @property
    def rate_per_s(self) -> float:
        """Rate of all requests of the window, sampled or not."""
        return self.offered / self.window_s if self.window_s > 0 else 0.0


class WorkloadSampler:
    """Of one cascade. A cascade of one tier is not sampled: there is nothing to plan between tiers."""

    def __init__(
        self,
        record: CascadeRecord,
        chain: JudgeChain,
        tiers: TierClient,
        report: Callable[[SampledWorkload], Awaitable[None]],
        window: SampleWindow[SampledRequest],
        metrics: CascadeMetrics,
    ) -> None:
        self._record = record
        self._chain = chain
        self._tiers = tiers
        self._report = report
        self._window = window
        self._metrics = metrics

    def is_for(self, record: CascadeRecord, chain: JudgeChain) -> bool:
        """Whether it samples what a sampler of this cascade would."""
        return chain is self._chain and (record.tiers, record.judges) == (self._record.tiers, self._record.judges)

    def offer(self, sampled: SampledRequest | None) -> None:
        """A request has come; None: it is too long to be kept."""
        if sampled is None:
            self._window.count()
        else:
            self._window.offer(sampled)

    async def close_window(self, now_s: float) -> None:
        """Have the window's samples answered by every tier, and report; also that no request came."""
        window = self._window.close(now_s)
        if len(self._record.tiers) >= 2:
            await self._report(await self._complete(window))

    async def _complete(self, window: Window[SampledRequest]) -> SampledWorkload:
        turns = asyncio.Semaphore(CONCURRENT)
        completed = await asyncio.gather(*(self._on_every_tier(item, turns) for item in window.items))
        first = self._record.judges[0]
        kept = [request for request, judge in filter(None, completed) if judge == first]
        dropped = len(completed) - len(kept)
        incomplete = sum(not request.is_complete for request in kept)
        self._metrics.samples.labels(self._record.name, "kept").inc(len(kept) - incomplete)
        self._metrics.samples.labels(self._record.name, "incomplete").inc(incomplete)
        self._metrics.samples.labels(self._record.name, "dropped").inc(dropped)
        if dropped:
            log.warning(
                "samples dropped", extra={"cascade": self._record.name, "dropped": dropped, "of": len(completed)}
            )
        return SampledWorkload(self._record, window.offered, window.seconds, tuple(kept), first)

    async def _on_every_tier(
        self, sampled: SampledRequest, turns: asyncio.Semaphore
    ) -> tuple[WorkloadRequest, str] | None:
        """And the judge of all its scores, "" if they are not of one; None if an answer or a score is missing, except
        those of tiers without an instance: a plan that gives a tier no GPUs must not be the last one."""
        answers: list[KnownAnswer | None] = []
        judges = set()
        async with turns:
            for model in self._record.tiers:
                if sampled.known is not None and sampled.known.model == model:
                    answers.append(sampled.known)
                    continue
                try:
                    answer = await self._tiers.answer(sampled, model)
                    judgement = await self._chain.judge(answer.judged)
                except NoInstance:
                    answers.append(None)
                    continue
                except (RpcError, JudgeUnavailable) as error:
                    log.info("a sample is left out", extra={"cascade": self._record.name, "error": str(error)})
                    return None
                answers.append(KnownAnswer(model, answer.output_tokens, judgement.score, answer.judged.token_logprobs))
                judges.add(judgement.judge)
        if sampled.known is not None:
            judges.add(self._record.judges[0])
        by_confidence = self._record.judges[0] == ConfidenceJudge.name
        request = WorkloadRequest(
            sampled.input_tokens,
            tuple(answer.output_tokens if answer else None for answer in answers),
            tuple(answer.score if answer else None for answer in answers),
            score_bounds=tuple(map(_score_bounds_of, answers)) if by_confidence else None,
        )
        return request, judges.pop() if len(judges) == 1 else ""


def _score_bounds_of(answer: KnownAnswer | None) -> ScoreBounds | None:
    return tuple(confidence_of(answer.token_logprobs).score_bounds) if answer is not None else None
