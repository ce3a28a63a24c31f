"""A request's way up a cascade: asks tiers and judges as the state machine says."""

import asyncio
import logging
from dataclasses import dataclass

import msgspec

from controlplane.model.cascade_record import CascadeRecord
from controlplane.protocols.cascade.terms import CascadeTerms
from controlplane.protocols.cascade.walk import Accept, Action, Because, CascadeWalk, Fail, Generate, Judge
from mesh.errors import JudgeUnavailable
from services.frontend.api.answer_schema import CascadeFacts, Usage
from services.frontend.api.errors import ApiError, model_not_found
from services.frontend.api.schema import ChatCompletionRequest, CompletionRequest
from services.frontend.cascade import told
from services.frontend.cascade.judge_request import CONFIDENCE, JudgeRequests
from services.frontend.cascade.live_stream import LiveAnswer, LiveStream
from services.frontend.cascade.tier_answer import Read, TierAnswer, TierQuestion, TierReader, ask_tier, read_until
from services.frontend.generating import Client
from services.frontend.service import FrontendService

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The answer for the client."""

    answer: TierAnswer
    usage: Usage
    """Of all tiers that answered."""
    facts: CascadeFacts


class Ascent:
    """One request; `run` it once."""

    def __init__(
        self,
        service: FrontendService,
        record: CascadeRecord,
        request: ChatCompletionRequest | CompletionRequest,
        request_id: str,
        arrived_s: float,
        terms: CascadeTerms,
        client: Client,
    ) -> None:
        self._service = service
        self._record = record
        self._request = request
        self._request_id = request_id
        self._arrived_s = arrived_s
        self._client = client
        self._walk = CascadeWalk(request_id, terms)
        self._answers: dict[int, TierAnswer] = {}
        self._usages: list[Usage] = []
        """Of every answer, those that were given up included."""
        self._judges: dict[int, str] = {}
        self._failures: dict[int, ApiError] = {}
        self._judge_requests = JudgeRequests(record, request, request_id)
        self._live: LiveStream | None = None
        self.doing = ""
        """In words, for keep-alives."""

    async def run(self, live: LiveStream | None) -> Accepted:
        """Raises the last tier's ApiError if no tier could answer.

        `live`: shows an answer that is sure to be accepted while it is being written. If its tier fails then, the
        answer has failed.
        """
        self._live = live
        action: Action = self._walk.first
        while not isinstance(action, Accept | Fail):
            if isinstance(action, Generate):
                self._count_escalation(action)
                action = await self._generate(action.tier)
            else:
                action = await self._judge(action)
        if isinstance(action, Fail):
            raise self._failures[max(self._failures)]
        return self._accepted(action)

    async def _generate(self, tier: int) -> Action:
        model_name = self._record.tiers[tier]
        self.doing = f"{model_name} is answering"
        began_s = self._service.clock()
        timeout_s = self._time_for_a_further_tier(began_s)
        try:
            async with asyncio.timeout(timeout_s):
                self._answers[tier] = await self._ask(tier, model_name, began_s)
        except TimeoutError:
            accepted = self._walk.out_of_time()
            if accepted is None:
                raise
            return accepted
        except ApiError as error:
            self._failures[tier] = error
            story = {"request_id": self._request_id, "tier": model_name, "error": error.message}
            if self._live is not None and self._live.began:
                self._service.metrics.cascade.broken_off.labels(self._record.name, model_name).inc()
                log.error("an answer broke off that its client had begun to get", extra=story)
                raise
            log.warning("a tier could not answer", extra=story)
            return self._walk.failed(tier, error.message, self._service.clock())
        self._usages.append(self._answers[tier].usage)
        if self._answers[tier].given_up:
            return self._gave_up(tier)
        action = self._walk.answered(tier, self._service.clock())
        if not isinstance(action, Judge):
            self._stays_unjudged(tier)
        return action

    async def _ask(self, tier: int, model_name: str, began_s: float) -> TierAnswer:
        model = await self._service.catalogue.find(model_name)
        if model is None:
            raise model_not_found(model_name)
        # The first request to a tier has the client's request id, so that it is found by it everywhere.
        is_first = tier == self._walk.terms.first_tier
        request_id = self._request_id if is_first else f"{self._request_id}-tier{tier}"
        if tier in self._answers:  # given up, and needed after all
            request_id += "-again"
        because = self._walk.will_accept
        is_live = self._live is not None and because is not None
        metrics = self._service.metrics
        labels = (self._record.name, model_name)
        question = TierQuestion(
            msgspec.structs.replace(self._request, model=model_name, penstock=None),
            request_id,
            model,
            began_s,
            ttft=metrics.cascade.tier_ttft.labels(*labels),
            inter_token=metrics.of(self._record.name if is_live else model_name).inter_token,
            with_logprobs=CONFIDENCE in self._record.judges and self._walk.may_be_judged,
        )
        answer = await ask_tier(self._service, question, self._client, self._read(tier, because))
        metrics.cascade.tier_seconds.labels(*labels).observe(answer.seconds)
        return answer

    def _read(self, tier: int, because: Because | None) -> Read:
        """How the tier's answer is read."""
        live = self._live
        if live is None or because is None:
            # Only of the judge that is asked first: the thresholds are for its scores.
            gives_up = self._record.judges[:1] == (CONFIDENCE,) and self._walk.may_give_up
            return read_until(self._walk.terms.thresholds[tier] if gives_up else 0.0)
        accept = Accept(tier, because)

        async def show(reader: TierReader) -> None:
            await live.show(
                LiveAnswer(
                    reader,
                    so_far=self._facts(accept, self._answers, None),
                    complete=lambda: self._facts(accept, {**self._answers, tier: reader.answer()}, self._seconds),
                    usage=lambda: told.summed([*self._usages, reader.usage()]),
                )
            )

        return show

    def _gave_up(self, tier: int) -> Action:
        """Nothing waits for the judge, who is told for the sake of those who count and sample."""
        answer = self._answers[tier]
        self._judges[tier] = CONFIDENCE
        self._service.judging.tell(self._judge_requests.to_judge(tier, answer))
        return self._walk.gave_up(tier, answer.confidence)

    def _stays_unjudged(self, tier: int) -> None:
        """The tier's time is complete without a judgement, and a request that had no answer before is still to be
        counted."""
        answer = self._answers[tier]
        self._service.cascades.times.took(self._record.tiers[tier], answer.seconds)
        if not self._judge_requests.is_counted:
            self._service.judging.tell(self._judge_requests.to_count(tier, answer))

    def _count_escalation(self, action: Generate) -> None:
        if action.because is not None:
            labels = (self._record.name, self._record.tiers[action.tier], action.because.value)
            self._service.metrics.cascade.escalations.labels(*labels).inc()

    def _time_for_a_further_tier(self, now_s: float) -> float | None:
        """None where the request has no deadline of its own, or no answer yet to fall back on."""
        deadline_s = self._walk.terms.deadline_s
        return max(0.0, deadline_s - now_s) if deadline_s is not None and self._answers else None

    async def _judge(self, action: Judge) -> Action:
        tier = action.tier
        answer = self._answers[tier]
        self.doing = f"the answer of {self._record.tiers[tier]} is being judged"
        began_s = self._service.clock()
        deadline_s = self._walk.terms.deadline_s
        left_s = None if deadline_s is None else deadline_s - began_s
        try:
            score = await self._service.judging.judge(self._judge_requests.to_judge(tier, answer), left_s)
        except JudgeUnavailable as error:
            self._service.metrics.cascade.unjudged.labels(self._record.name).inc()
            log.warning("an answer could not be judged", extra={"request_id": self._request_id, "error": str(error)})
            self._judges[tier] = f"none: {error}"
            return self._walk.not_judged(tier, self._service.clock())
        now_s = self._service.clock()
        self._service.cascades.times.took(self._record.tiers[tier], answer.seconds + now_s - began_s)
        self._judges[tier] = score.judge
        return self._walk.judged(tier, score.score, now_s)

    def _accepted(self, accept: Accept) -> Accepted:
        labels = (self._record.name, self._record.tiers[accept.tier], accept.because.value)
        self._service.metrics.cascade.answers.labels(*labels).inc()
        facts = self._facts(accept, self._answers, self._seconds)
        return Accepted(self._answers[accept.tier], told.summed(self._usages), facts)

    @property
    def _seconds(self) -> float:
        return self._service.clock() - self._arrived_s

    def _facts(self, accept: Accept, answers: dict[int, TierAnswer], seconds: float | None) -> CascadeFacts:
        failures = {tier: error.message for tier, error in self._failures.items()}
        return told.facts(self._record, accept, answers, self._walk.scores, self._judges, failures, seconds)
