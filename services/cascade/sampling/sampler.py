"""One cascade's windows, one after the other, reported to the planner."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from controlplane.model.cascade_record import MAX_SCORE, CascadeRecord
from controlplane.planning.cascade.early_exit import ScoreBounds
from controlplane.planning.cascade.workload import WorkloadRequest
from controlplane.protocols.cascade.confidence import confidence_of
from mesh.errors import JudgeUnavailable, NoInstance, RpcError
from services.cascade.judges.chain import JudgeChain
from services.cascade.judges.confidence import ConfidenceJudge
from services.cascade.judges.exact import ExactJudge
from services.cascade.judges.interface import JudgedAnswer, Judgement
from services.cascade.metrics import CascadeMetrics
from services.cascade.sampling.kept import KeptSamples
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


class _Completed(NamedTuple):
    request: WorkloadRequest
    judge: str
    """Of all its scores; empty if they are not of one."""
    answers: tuple[str | None, ...]


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
        labels: JudgeChain | None = None,
        keeps_texts: bool = False,
    ) -> None:
        self._record = record
        self._chain = chain
        self._tiers = tiers
        self._report = report
        self._window = window
        self._metrics = metrics
        self._labels = labels
        self.kept = KeptSamples(keeps_texts)

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
        kept: list[WorkloadRequest] = []
        for sampled, done in zip(window.items, completed, strict=True):
            if done is not None and done.judge == first:
                kept.append(done.request)
                self.kept.add(done.request, sampled.prompt, done.answers)
        dropped = len(completed) - len(kept)
        incomplete = sum(not request.is_complete for request in kept)
        self._metrics.samples.labels(self._record.name, "kept").inc(len(kept) - incomplete)
        self._metrics.samples.labels(self._record.name, "incomplete").inc(incomplete)
        self._metrics.samples.labels(self._record.name, "dropped").inc(dropped)
        if dropped:
            log.warning(
                "samples dropped", extra={"cascade": self._record.name, "dropped": dropped, "of": len(completed)}
            )
        workload = SampledWorkload(self._record, window.offered, window.seconds, tuple(kept), first)
        if window.offered:
            self.kept.rate_per_s = workload.rate_per_s
        return workload

    async def _on_every_tier(self, sampled: SampledRequest, turns: asyncio.Semaphore) -> _Completed | None:
        """None if an answer or a score is missing, except
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
                judged = answer.judged
                known = KnownAnswer(model, answer.output_tokens, judgement.score, judged.answer, judged.token_logprobs)
                answers.append(known)
                judges.add(judgement.judge)
            quality = await self._labelled(sampled, answers)
        if sampled.known is not None:
            judges.add(self._record.judges[0])
        by_confidence = self._record.judges[0] == ConfidenceJudge.name
        request = WorkloadRequest(
            sampled.input_tokens,
            tuple(answer.output_tokens if answer else None for answer in answers),
            tuple(answer.score if answer else None for answer in answers),
            quality=quality,
            score_bounds=tuple(map(_score_bounds_of, answers)) if by_confidence else None,
            request_id=sampled.request_id,
        )
        texts = tuple(answer.text if answer else None for answer in answers)
        return _Completed(request, judges.pop() if len(judges) == 1 else "", texts)

    async def _labelled(
        self, sampled: SampledRequest, answers: Sequence[KnownAnswer | None]
    ) -> tuple[float | None, ...] | None:
        """The labels of the answers; None for one that could not be labelled. None: nobody labels."""
        if self._labels is None:
            return None
        quality: list[float | None] = []
        reference = answers[-1].text if answers[-1] is not None else None
        for answer in answers:
            label: float | None = None
            if answer is not None:
                judged = JudgedAnswer(sampled.prompt, answer.text, answer.model, answer.token_logprobs, reference)
                try:
                    label = label_of(await self._labels.judge(judged))
                except JudgeUnavailable as error:
                    log.info("an answer is not labelled", extra={"cascade": self._record.name, "error": str(error)})
            outcome = "missing" if label is None else "given"
            self._metrics.labels.labels(self._record.name, self._record.label, outcome).inc()
            quality.append(label)
        return tuple(quality)


def label_of(judgement: Judgement) -> float:
    """What a judgement says as a label: an exact check knows right from wrong, and nothing between."""
    if judgement.judge == ExactJudge.name:
        return MAX_SCORE if judgement.score >= MAX_SCORE else 0.0
    return judgement.score


def _score_bounds_of(answer: KnownAnswer | None) -> ScoreBounds | None:
    return tuple(confidence_of(answer.token_logprobs).score_bounds) if answer is not None else None
