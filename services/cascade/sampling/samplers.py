"""The samplers of all cascades in force."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count

import msgspec

from controlplane.model.cascade_record import CascadeRecord
from penstock.v1 import cascade_pb2
from services.cascade.judges.chain import JudgeChain
from services.cascade.judges.interface import Judgement
from services.cascade.metrics import CascadeMetrics
from services.cascade.sampling.sampler import SampledWorkload, WorkloadSampler, new_window
from services.cascade.sampling.tiers import SampledRequest, TierClient

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """From the role's settings."""

    window_s: float
    requests: int
    """0: none."""


class Samplers:
    """One for each cascade; a cascade that changes begins a new window."""

    def __init__(
        self,
        settings: SamplingSettings,
        tiers: TierClient,
        report: Callable[[SampledWorkload], Awaitable[None]],
        clock: Callable[[], float],
        metrics: CascadeMetrics,
    ) -> None:
        self._settings = settings
        self._tiers = tiers
        self._report = report
        self._clock = clock
        self._metrics = metrics
        self._samplers: dict[str, WorkloadSampler] = {}
        self._seeds = count()

    def begin(self, record: CascadeRecord, chain: JudgeChain) -> None:
        """A cascade came into force, or another came under its name."""
        if self._settings.requests:
            window = new_window(self._settings.requests, self._clock(), next(self._seeds))
            self._samplers[record.name] = WorkloadSampler(
                record, chain, self._tiers, self._report, window, self._metrics
            )

    def end(self, name: str) -> None:
        """A cascade is gone."""
        self._samplers.pop(name, None)

    def judged(self, record: CascadeRecord, request: cascade_pb2.JudgeRequest, judgement: Judgement) -> None:
        """An answer of the first tier was judged."""
        sampler = self._samplers.get(record.name)
        if sampler is None or request.tier != record.tiers[0] or judgement.judge != record.judges[0]:
            return
        sampler.offer(_sampled(request, judgement.score))

    async def run(self) -> None:
        """Close windows, for ever."""
        while True:
            await asyncio.sleep(self._settings.window_s)
            for name, sampler in list(self._samplers.items()):
                try:
                    await sampler.close_window(self._clock())
                # A bug in one cascade's sampling must not end that of the others.
                except Exception:
                    log.exception("a window of samples is lost", extra={"cascade": name})


def _sampled(request: cascade_pb2.JudgeRequest, score: float) -> SampledRequest | None:
    if not request.request_json or not request.prompt_tokens or not request.completion_tokens:
        return None
    return SampledRequest(
        request=msgspec.json.decode(request.request_json, type=dict),
        chat=request.chat,
        prompt=request.prompt,
        input_tokens=request.prompt_tokens,
        output_tokens=request.completion_tokens,
        score=score,
        token_logprobs=tuple(request.token_logprobs),
        given_up=request.given_up,
    )
