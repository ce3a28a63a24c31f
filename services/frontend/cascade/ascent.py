"""A request's way up a cascade: asks tiers and judges as the state machine says."""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from math import inf
from typing import Any

import msgspec

from controlplane.model.cascade_record import CascadeRecord
from controlplane.protocols.cascade.terms import CascadeTerms
from controlplane.protocols.cascade.walk import Accept, Action, Because, CascadeWalk, Fail, Generate, Judge
from mesh.errors import JudgeUnavailable
from services.frontend.answers.schema import CascadeFacts, Usage
from services.frontend.cascade import response_metadata
from services.frontend.cascade.attempt import Attempt, summed
from services.frontend.cascade.judge_request import CONFIDENCE, JudgeRequests
from services.frontend.cascade.live_stream import LiveAnswer, LiveStream
from services.frontend.cascade.service import CascadeService
from services.frontend.cascade.tier_answer import Read, TierAnswer, TierQuestion, TierReader, ask_tier, read_until
from services.frontend.errors import DEADLINE_EXCEEDED, STOPPED, ApiError, model_not_found
from services.frontend.requests.generation import Client
from services.frontend.requests.schema import ChatCompletionRequest, CompletionRequest

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The answer for the client."""

    answer: TierAnswer
    usage: Usage
    """Of all tiers that were asked, as often as they were."""
    facts: CascadeFacts


class Ascent:
    """One request; `run` it once."""

    def __init__(
        self,
        service: CascadeService,
        record: CascadeRecord,
        request: ChatCompletionRequest | CompletionRequest,
        request_id: str,
        arrived_s: float,
        terms: CascadeTerms,
        client: Client,
    ) -> None:
        self._service = service.frontend
        self._cascades = service.cascades
        self._judging = service.judging
        self._record = record
        self._request = request
        self._request_id = request_id
        self._arrived_s = arrived_s
        self._client = client
        self._walk = CascadeWalk(request_id, terms)
        self._attempts: list[Attempt] = []
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
            raise max((a.tier, place, a.failure) for place, a in enumerate(self._attempts) if a.failure is not None)[2]
        return self._accepted(action)

    async def _generate(self, tier: int) -> Action:
        attempt = Attempt(tier, self._record.tiers[tier], self._service.clock())
        self.doing = f"{attempt.model} is answering"
        timeout_s = self._time_for_a_further_tier(attempt.began_s)
        before, self._attempts = self._attempts, [*self._attempts, attempt]
        try:
            async with asyncio.timeout(timeout_s):
                attempt.answer = await self._ask(attempt, before)
        except TimeoutError:
            attempt.cut_s = self._service.clock() - attempt.began_s
            accepted = self._walk.out_of_time()
            if accepted is None:
                raise
            return accepted
        except ApiError as error:
            return self._failed(attempt, error)
        if attempt.answer.given_up:
            return self._gave_up(attempt, attempt.answer)
        action = self._walk.answered(tier, self._service.clock())
        # A request that had no answer before is still to be counted.
        if not isinstance(action, Judge) and not self._judge_requests.is_counted:
            self._judging.tell(self._judge_requests.to_count(tier, attempt.answer))
        return action

    def _failed(self, attempt: Attempt, error: ApiError) -> Action:
        attempt.failure = error
        story = {"request_id": self._request_id, "tier": attempt.model, "error": error.message}
        if self._live is not None and self._live.began:
            self._service.metrics.cascade.broken_off.labels(self._record.name, attempt.model).inc()
            log.error("an answer broke off that its client had begun to get", extra=story)
            raise error
        log.warning("a tier could not answer", extra=story)
        if error.code in (DEADLINE_EXCEEDED, STOPPED):  # no other tier would fare better
            accepted = self._walk.out_of_time()
            if accepted is None:
                raise error
            return accepted
        return self._walk.failed(attempt.tier, error.message, self._service.clock())

    async def _ask(self, attempt: Attempt, before: list[Attempt]) -> TierAnswer:
        model = await self._service.catalogue.find(attempt.model)
        if model is None:
            raise model_not_found(attempt.model)
        because = self._walk.will_accept
        is_live = self._live is not None and because is not None
        metrics = self._service.metrics
        labels = (self._record.name, attempt.model)
        question = TierQuestion(
            msgspec.structs.replace(self._request, model=attempt.model, penstock=None),
            self._request_id_of(attempt, before),
            model,
            attempt.began_s,
            ttft=metrics.cascade.tier_ttft.labels(*labels),
            inter_token=metrics.of(self._record.name if is_live else attempt.model).inter_token,
            # Another tier that can answer now is better than one that may be back in half a minute.
            waits=not any(self._service.pool.connected(tier) for tier in self._record.tiers if tier != attempt.model),
            with_logprobs=CONFIDENCE in self._record.judges and self._walk.may_be_judged,
        )
        answer = await self._timed(
            attempt, ask_tier(self._service, question, self._client, self._read(attempt, because, before))
        )
        if not answer.given_up:
            metrics.cascade.tier_seconds.labels(*labels).observe(answer.seconds)
        return answer

    def _request_id_of(self, attempt: Attempt, before: list[Attempt]) -> str:
        """The first request to a tier has the client's request id, so that it is found by it everywhere."""
        is_first = attempt.tier == self._walk.terms.first_tier
        request_id = self._request_id if is_first else f"{self._request_id}-tier{attempt.tier}"
        is_again = any(attempt.tier == former.tier for former in before)  # given up, and needed after all
        return f"{request_id}-again" if is_again else request_id

    async def _timed(self, attempt: Attempt, answering: Coroutine[Any, Any, TierAnswer]) -> TierAnswer:
        """What is cut, be it at the deadline, by its client or because it was given up, would have taken longer."""
        clock, times = self._service.clock, self._cascades.times.answer(attempt.model)
        times.begins(attempt.began_s)
        try:
            answer = await answering
        except asyncio.CancelledError:
            now_s = clock()
            times.took_at_least(now_s - attempt.began_s, now_s)
            raise
        (times.took_at_least if answer.given_up else times.took)(answer.seconds, clock())
        return answer

    def _read(self, attempt: Attempt, because: Because | None, before: list[Attempt]) -> Read:
        """How the tier's answer is read."""
        live = self._live
        # Only of the judge that is asked first: the thresholds are for its scores.
        gives_up = self._record.judges[:1] == (CONFIDENCE,) and self._walk.may_give_up
        read_on = read_until(self._walk.terms.thresholds[attempt.tier] if gives_up else 0.0)

        async def read(reader: TierReader) -> None:
            attempt.reader = reader
            if live is None or because is None:
                await read_on(reader)
                return
            accept = Accept(attempt.tier, because)

            def complete() -> CascadeFacts:
                attempt.answer = reader.answer()
                return self._facts(accept, self._attempts, self._seconds)

            so_far = self._facts(accept, before, None)
            await live.show(LiveAnswer(reader, so_far, complete, usage=lambda: summed(self._attempts)))

        return read

    def _gave_up(self, attempt: Attempt, answer: TierAnswer) -> Action:
        """Nothing waits for the judge, who is told for the sake of those who count and sample."""
        attempt.judge, attempt.score = CONFIDENCE, answer.confidence
        self._judging.tell(self._judge_requests.to_judge(attempt.tier, answer))
        return self._walk.gave_up(attempt.tier, answer.confidence)

    def _count_escalation(self, action: Generate) -> None:
        if action.because is not None:
            labels = (self._record.name, self._record.tiers[action.tier], action.because.value)
            self._service.metrics.cascade.escalations.labels(*labels).inc()

    def _time_for_a_further_tier(self, now_s: float) -> float | None:
        """None where the request has no deadline of its own, or no answer yet to fall back on."""
        deadline_s = self._walk.terms.deadline_s
        has_answer = any(attempt.answer is not None for attempt in self._attempts)
        return max(0.0, deadline_s - now_s) if deadline_s is not None and has_answer else None

    async def _judge(self, action: Judge) -> Action:
        attempt, answer = self._answered(action.tier)
        self.doing = f"the answer of {attempt.model} is being judged"
        began_s = self._service.clock()
        deadline_s = self._walk.terms.deadline_s
        left_s = min(self._client.left_s(), inf if deadline_s is None else deadline_s - began_s)
        times = self._cascades.times.judgement(self._record.name)
        times.begins(began_s)
        try:
            score = await self._judging.judge(self._judge_requests.to_judge(action.tier, answer), left_s)
        except JudgeUnavailable as error:
            now_s = self._service.clock()
            times.took_at_least(now_s - began_s, now_s)
            self._service.metrics.cascade.unjudged.labels(self._record.name).inc()
            log.warning("an answer could not be judged", extra={"request_id": self._request_id, "error": str(error)})
            attempt.judge = f"none: {error}"
            return self._walk.not_judged(action.tier, now_s)
        now_s = self._service.clock()
        times.took(now_s - began_s, now_s)
        attempt.judge, attempt.score = score.judge, score.score
        return self._walk.judged(action.tier, score.score, now_s)

    def _accepted(self, accept: Accept) -> Accepted:
        labels = (self._record.name, self._record.tiers[accept.tier], accept.because.value)
        self._service.metrics.cascade.answers.labels(*labels).inc()
        _, answer = self._answered(accept.tier)
        return Accepted(answer, summed(self._attempts), self._facts(accept, self._attempts, self._seconds))

    def _answered(self, tier: int) -> tuple[Attempt, TierAnswer]:
        """The tier's last answer."""
        answers = ((attempt, attempt.answer) for attempt in reversed(self._attempts) if attempt.tier == tier)
        return next((attempt, answer) for attempt, answer in answers if answer is not None)

    @property
    def _seconds(self) -> float:
        return self._service.clock() - self._arrived_s

    def _facts(self, accept: Accept, attempts: list[Attempt], seconds: float | None) -> CascadeFacts:
        return response_metadata.facts(self._record, accept, attempts, seconds)
