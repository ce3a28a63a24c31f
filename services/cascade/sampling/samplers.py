"""The samplers of all cascades in force."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from controlplane.model.cascade_record import CascadeRecord
from controlplane.planning.cascade.drift import MIN_REQUESTS
from mesh.runtime import Entropy
from penstock.v1 import cascade_pb2
from services.cascade.judges.chain import JudgeChain
from services.cascade.judges.interface import Judgement
from services.cascade.metrics import CascadeMetrics
from services.cascade.sampling.kept import KeptSamples
from services.cascade.sampling.sampler import SampledWorkload, WorkloadSampler
from services.cascade.sampling.tiers import KnownAnswer, SampledRequest, TierClient
from services.cascade.sampling.window import SampleWindow

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How often and how much is sampled, of the cascade router's settings."""

    window_s: float
    requests: int
    """0: none."""
    keeps_texts: bool = False
    """Of the last samples, for `penstock cascade export --texts`."""

    def warning(self) -> str:
        """What makes all sampling useless, in words; empty if nothing does."""
        if 0 < self.requests < MIN_REQUESTS:
            return (
                f"{self.requests} requests of a window are too few to plan for: no cascade will be planned; sample "
                f"{MIN_REQUESTS} at least (--sample-requests), or 0 to sample none"
            )
        return ""


class Samplers:
    """One for each cascade; a cascade of other models or judges begins a new window."""

    def __init__(
        self,
        settings: SamplingSettings,
        tiers: TierClient,
        report: Callable[[SampledWorkload], Awaitable[None]],
        clock: Callable[[], float],
        entropy: Entropy,
        metrics: CascadeMetrics,
    ) -> None:
        self._settings = settings
        self._tiers = tiers
        self._report = report
        self._clock = clock
        self._entropy = entropy
        self._metrics = metrics
        self._samplers: dict[str, WorkloadSampler] = {}
        self._closing: set[WorkloadSampler] = set()
        if settings.warning():
            log.error(settings.warning())

    def begin(self, record: CascadeRecord, chain: JudgeChain, labels: JudgeChain | None = None) -> None:
        """A cascade came into force, or another came under its name. Other thresholds do not change what is sampled.
        `labels` asks the judge that labels samples, if there is one."""
        former = self._samplers.get(record.name)
        if self._settings.requests and (former is None or not former.is_for(record, chain)):
            window = SampleWindow[SampledRequest](self._settings.requests, self._clock(), self._entropy.generator())
            self._samplers[record.name] = WorkloadSampler(
                record,
                chain,
                self._tiers,
                self._report,
                window,
                self._metrics,
                labels,
                self._settings.keeps_texts,
            )

    def end(self, name: str) -> None:
        """Stop sampling a cascade that was removed."""
        self._samplers.pop(name, None)

    def kept(self, name: str) -> KeptSamples:
        """The last samples of a cascade; none of one that is not sampled."""
        sampler = self._samplers.get(name)
        return KeptSamples(self._settings.keeps_texts) if sampler is None else sampler.kept

    def offer(self, record: CascadeRecord, request: cascade_pb2.JudgeRequest, judgement: Judgement | None) -> None:
        """A client's request has got its first answer, whichever tier gave it; what else is judged of the request does
        not count it again. `judgement`: of that answer, if there is one. A request that the first judge had no score
        for is counted only: the scores of other judges do not compare."""
        sampler = self._samplers.get(record.name)
        if sampler is None or not request.first_answer:
            return
        by_first = judgement is not None and judgement.judge == record.judges[0]
        sampler.offer(_sampled(request, judgement) if by_first or request.sample_only else None)

    async def run(self) -> None:
        """Close windows, for ever. A cascade whose samples are still being answered goes on with its window."""
        async with asyncio.TaskGroup() as closing:
            while True:
                await asyncio.sleep(self._settings.window_s)
                for name, sampler in self._samplers.items():
                    if sampler not in self._closing:
                        self._closing.add(sampler)
                        closing.create_task(self._close(name, sampler))

    async def _close(self, name: str, sampler: WorkloadSampler) -> None:
        try:
            await sampler.close_window(self._clock())
        # A bug in one cascade's sampling must not end that of the others.
        except Exception:
            log.exception("a window of samples is lost", extra={"cascade": name})
        finally:
            self._closing.discard(sampler)


def _sampled(request: cascade_pb2.JudgeRequest, judgement: Judgement | None) -> SampledRequest | None:
    if not request.request_json or not request.prompt_tokens:
        return None
    known = None
    if judgement is not None and request.completion_tokens and not request.given_up:  # that is no whole answer
        known = KnownAnswer(
            request.tier, request.completion_tokens, judgement.score, request.answer, tuple(request.token_logprobs)
        )
    return SampledRequest(
        request=msgspec.json.decode(request.request_json, type=dict),
        chat=request.chat,
        prompt=request.prompt,
        input_tokens=request.prompt_tokens,
        known=known,
        request_id=request.request_id,
    )
