"""Carries out a cascade's state machine for one request: asks tiers and judges, and tells what came of it."""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import msgspec

from controlplane.model.cascade_record import CascadeRecord
from controlplane.protocols.cascade.escalation_odds import UNBEGUN, Progress, progress_of
from controlplane.protocols.cascade.state_machine import (
    Abandon,
    Accept,
    Answered,
    Begin,
    Broken,
    CascadeStateMachine,
    Doubted,
    EndedEarly,
    Event,
    Fail,
    Generate,
    Instruction,
    Judge,
    Judged,
    NotJudged,
    Report,
    Speculate,
    TierFailed,
)
from controlplane.protocols.cascade.terms import CascadeTerms
from mesh.errors import JudgeUnavailable
from services.frontend.answers.schema import CascadeFacts, Usage
from services.frontend.cascade import response_metadata
from services.frontend.cascade.ahead import AnswerAhead
from services.frontend.cascade.attempt import Attempt, summed
from services.frontend.cascade.judge_request import CONFIDENCE, JudgeRequests
from services.frontend.cascade.live_stream import LiveAnswer, LiveStream
from services.frontend.cascade.service import CascadeService
from services.frontend.cascade.tier_answer import Read, TierAnswer, TierQuestion, TierReader, ask_tier, read_until
from services.frontend.errors import DEADLINE_EXCEEDED, STOPPED, ApiError
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


class CascadeExecutor:
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
        self._latencies = service.cascades.latencies
        self._judging = service.judging
        self._record = record
        self._request = request
        self._request_id = request_id
        self._arrived_s = arrived_s
        self._client = client
        self._first_tier = terms.first_tier
        self._machine = CascadeStateMachine(request_id, terms)
        self._attempts: list[Attempt] = []
        """One for each `Generate`, in order."""
        self._judge_requests = JudgeRequests(record, request, request_id)
        self._ahead: AnswerAhead | None = None
        self._passed: set[Progress] = set()
        """Groups that the answer under way has passed through."""
        self._live: LiveStream | None = None
        self.doing = ""
        """What the request waits for just now, in words that its client may read."""

    @property
    def usages(self) -> Sequence[tuple[str, Usage]]:
        """By model, what each tier that was asked has used so far, whether or not its answer was sent."""
        return [(attempt.model, attempt.usage) for attempt in self._attempts]

    async def run(self, live: LiveStream | None) -> Accepted:
        """The accepted answer. Raises the last tier's ApiError if no tier could answer.

        `live`: shows an answer that is sure to be accepted while it is being written. If its tier fails then, the
        answer has failed.
        """
        self._live = live
        try:
            return await self._carry_out()
        finally:
            await self._abandon()

    async def _carry_out(self) -> Accepted:
        event: Event = Begin()
        while True:
            *before, instruction = self._machine.handle(event, self._service.clock())
            self._machine.validate()
            self._learn(event, instruction)
            for each in before:
                if isinstance(each, Abandon):
                    await self._abandon()
                else:
                    self._report(each)
            match instruction:
                case Generate():
                    event = await self._generate(instruction)
                case Judge():
                    event = await self._judge(instruction)
                case Accept():
                    return self._accepted(instruction)
                case Fail(asked=asked):
                    failure = self._attempts[asked].failure
                    assert failure is not None, "the attempt that is told of has failed"
                    raise failure

    async def _generate(self, asking: Generate) -> Event:
        self._count_escalation(asking)
        tier = asking.tier
        ahead = self._taken_ahead(asking)
        asking = replace(asking, begun_ahead=ahead is not None)
        attempt = ahead.attempt if ahead is not None else self._attempt(tier)
        self.doing = f"{attempt.model} is answering"
        before, self._attempts = self._attempts, [*self._attempts, attempt]
        self._passed = set()
        self._doubt(tier, UNBEGUN)
        try:
            async with asyncio.timeout(asking.timeout_s):
                read = self._read(asking, attempt, before)
                if ahead is not None:
                    attempt.answer = await ahead.claimed(read, asking)
                else:
                    attempt.answer = await self._ask(asking, attempt, before, read, self._client)
        except TimeoutError:
            attempt.cut_s = self._service.clock() - attempt.began_s
            return Broken(tier, "cut at the request's deadline", may_accept_another=True)
        except ApiError as error:
            return self._failed(attempt, error)
        if attempt.answer.given_up:
            attempt.judge, attempt.score = CONFIDENCE, attempt.answer.confidence
            return EndedEarly(tier, attempt.answer.confidence)
        return Answered(tier)

    def _failed(self, attempt: Attempt, error: ApiError) -> Event:
        attempt.failure = error
        story = {"request_id": self._request_id, "tier": attempt.model, "error": error.message}
        if self._live is not None and self._live.began:
            self._service.metrics.cascade.broken_off.labels(self._record.name, attempt.model).inc()
            log.error("an answer broke off that its client had begun to get", extra=story)
            return Broken(attempt.tier, error.message, may_accept_another=False)
        log.warning("a tier could not answer", extra=story)
        if error.code in (DEADLINE_EXCEEDED, STOPPED):  # no other tier would fare better
            return Broken(attempt.tier, error.message, may_accept_another=True)
        return TierFailed(attempt.tier, error.message, self._reachable())

    def _attempt(self, tier: int) -> Attempt:
        return Attempt(tier, self._record.tiers[tier], self._service.clock())

    def _doubt(self, tier: int, progress: Progress) -> None:
        """An answer has come so far: the next tier may be begun ahead."""
        if self._machine.terms.speculate_from <= 0 or progress in self._passed:
            return
        self._passed.add(progress)
        p_escalates = self._cascades.odds(self._record.name, tier).p_escalates(progress)
        room = self._record.speculate_room
        tiers = enumerate(self._record.tiers)
        with_room = frozenset(
            each for each, model in tiers if any(link.requests < room for link in self._service.pool.connected(model))
        )
        for each in self._machine.handle(Doubted(tier, p_escalates, with_room), self._service.clock()):
            assert isinstance(each, Speculate), "a doubt is answered by nothing else"
            self._begin_ahead(each)
        self._machine.validate()

    def _begin_ahead(self, speculate: Speculate) -> None:
        attempt = self._attempt(speculate.tier)
        attempt.begun_ahead = True
        asking = Generate(speculate.tier, may_be_judged=speculate.may_be_judged, begun_ahead=True)
        ahead = self._ahead = AnswerAhead(attempt)
        # At its deadline, an answer that nobody waits for is no reason to close the client's connection.
        client = replace(self._client, may_return=False, cut=lambda: self._client.cut() if ahead.is_claimed else None)
        answering = self._ask(asking, attempt, [], ahead.read, client)
        ahead.task = asyncio.create_task(answering, name="answer ahead")

    def _taken_ahead(self, asking: Generate) -> AnswerAhead | None:
        """What was begun ahead of this, unless it has failed: then the tier is asked anew."""
        if not asking.begun_ahead:
            return None
        ahead, self._ahead = self._ahead, None
        assert ahead is not None, "the state machine had it begun"
        outcome = "failed" if ahead.has_failed else "used"
        self._service.metrics.cascade.speculations.labels(self._record.name, ahead.attempt.model, outcome).inc()
        return None if ahead.has_failed else ahead

    async def _abandon(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return
        await ahead.abandon()
        self._attempts = [*self._attempts, ahead.attempt]
        labels = (self._record.name, ahead.attempt.model)
        metrics = self._service.metrics.cascade
        metrics.speculations.labels(*labels, "abandoned").inc()
        metrics.speculated_tokens_wasted.labels(*labels).inc(ahead.attempt.usage.completion_tokens)

    def _learn(self, event: Event, instruction: Instruction) -> None:
        """Whether an answer that came so far was escalated; what failed or was not judged says nothing."""
        if isinstance(event, Judged | EndedEarly) and self._machine.terms.speculate_from > 0:
            self._cascades.odds(self._record.name, event.tier).note(
                self._passed, escalated=not isinstance(instruction, Accept)
            )

    async def _ask(
        self, asking: Generate, attempt: Attempt, before: list[Attempt], read: Read, client: Client
    ) -> TierAnswer:
        model = await self._service.model(attempt.model)
        is_live = self._live is not None and asking.will_accept is not None
        metrics = self._service.metrics
        labels = (self._record.name, attempt.model)
        question = TierQuestion(
            msgspec.structs.replace(self._request, model=attempt.model, penstock=None),
            self._request_id_of(asking),
            model,
            attempt.began_s,
            ttft=metrics.cascade.tier_ttft.labels(*labels),
            inter_token=metrics.of(self._record.name if is_live else attempt.model).inter_token,
            may_wait=lambda: not asking.begun_ahead and self._must_wait_for(attempt.tier, before),
            with_logprobs=CONFIDENCE in self._record.judges and asking.may_be_judged,
        )
        answer = await self._timed(attempt, ask_tier(self._service, question, client, read))
        if not answer.given_up:
            metrics.cascade.tier_seconds.labels(*labels).observe(answer.seconds)
        return answer

    def _must_wait_for(self, tier: int, before: list[Attempt]) -> bool:
        """Another tier's answer that is there, or that can be had now, is better than one of a tier that may be back in
        half a minute."""
        has_answer = any(attempt.answer is not None for attempt in before)
        return not has_answer and not self._reachable() - {tier}

    def _reachable(self) -> frozenset[int]:
        """Tiers that may be asked and have an instance now."""
        may_be_asked = self._record.tiers[: self._machine.terms.last_tier + 1]
        return frozenset(tier for tier, model in enumerate(may_be_asked) if self._service.pool.connected(model))

    def _request_id_of(self, asking: Generate) -> str:
        """The first request to a tier has the client's request id, so that it is found by it everywhere."""
        is_first = asking.tier == self._first_tier
        request_id = self._request_id if is_first else f"{self._request_id}-tier{asking.tier}"
        if asking.begun_ahead:
            return f"{request_id}-ahead"
        return f"{request_id}-again" if asking.attempt > 1 else request_id

    async def _timed(self, attempt: Attempt, answering: Coroutine[Any, Any, TierAnswer]) -> TierAnswer:
        """What is cut, be it at the deadline, by its client or by an early exit, would have taken longer."""
        clock, latency = self._service.clock, self._latencies.answer_latency(attempt.model)
        latency.begins(attempt.began_s)
        try:
            answer = await answering
        except asyncio.CancelledError:
            now_s = clock()
            latency.took_at_least(now_s - attempt.began_s, now_s)
            raise
        (latency.took_at_least if answer.given_up else latency.took)(answer.seconds, clock())
        return answer

    def _read(self, asking: Generate, attempt: Attempt, before: list[Attempt]) -> Read:
        """How the tier's answer is read: shown as it comes, to its end, or until it exits early."""
        live = self._live

        def progressed(reader: TierReader) -> None:
            self._doubt(attempt.tier, progress_of(reader.tokens, reader.confidence))

        # The thresholds are for the scores of the judge that is asked first.
        is_first_judge = self._record.judges[:1] == (CONFIDENCE,)
        read_on = read_until(asking.early_exit_below if is_first_judge else 0.0, progressed)

        async def read(reader: TierReader) -> None:
            attempt.reader = reader
            if live is None or asking.will_accept is None:
                await read_on(reader)
                return
            accept = Accept(attempt.tier, asking.will_accept)

            def complete() -> CascadeFacts:
                attempt.answer = reader.answer()
                return self._facts(accept, self._attempts, self._seconds)

            so_far = self._facts(accept, before, None)
            await live.show(LiveAnswer(reader, so_far, complete, usage=lambda: summed(self._attempts)))

        return read

    def _report(self, report: Instruction) -> None:
        assert isinstance(report, Report), "only reports come before the next thing to do"
        answer = self._attempts[-1].answer
        assert answer is not None, "the tier that was asked last has just answered"
        make = self._judge_requests.to_judge if report.for_score else self._judge_requests.to_count
        self._judging.tell(make(report.tier, answer))

    def _count_escalation(self, asking: Generate) -> None:
        if asking.reason is not None:
            labels = (self._record.name, self._record.tiers[asking.tier], asking.reason.value)
            self._service.metrics.cascade.escalations.labels(*labels).inc()

    async def _judge(self, judge: Judge) -> Event:
        attempt, answer = self._answered(judge.tier)
        self.doing = f"the answer of {attempt.model} is being judged"
        self._doubt(judge.tier, progress_of(0, answer.confidence, is_whole=True))
        began_s = self._service.clock()
        left_s = min(self._client.left_s(), inf if judge.timeout_s is None else judge.timeout_s)
        latency = self._latencies.judge_latency(self._record.name)
        latency.begins(began_s)
        try:
            with self._service.tracer.child("judge", self._client.traceparent) as span:
                score = await self._judging.judge(self._judge_requests.to_judge(judge.tier, answer), left_s)
                span.set(request_id=self._request_id, tier=attempt.model, judge=score.judge, score=score.score)
        except JudgeUnavailable as error:
            now_s = self._service.clock()
            latency.took_at_least(now_s - began_s, now_s)
            self._service.metrics.cascade.unjudged.labels(self._record.name).inc()
            log.warning("an answer could not be judged", extra={"request_id": self._request_id, "error": str(error)})
            attempt.judge = f"none: {error}"
            return NotJudged(judge.tier)
        now_s = self._service.clock()
        latency.took(now_s - began_s, now_s)
        attempt.judge, attempt.score = score.judge, score.score
        return Judged(judge.tier, score.score)

    def _accepted(self, accept: Accept) -> Accepted:
        labels = (self._record.name, self._record.tiers[accept.tier], accept.reason.value)
        self._service.metrics.cascade.answers.labels(*labels).inc()
        _, answer = self._answered(accept.tier)
        return Accepted(answer, summed(self._attempts), self._facts(accept, self._attempts, self._seconds))

    def _answered(self, tier: int) -> tuple[Attempt, TierAnswer]:
        """The tier's last answer and the attempt that gave it; an attempt that failed gave none."""
        answers = ((attempt, attempt.answer) for attempt in reversed(self._attempts) if attempt.tier == tier)
        return next((attempt, answer) for attempt, answer in answers if answer is not None)

    @property
    def _seconds(self) -> float:
        return self._service.clock() - self._arrived_s

    def _facts(self, accept: Accept, attempts: list[Attempt], seconds: float | None) -> CascadeFacts:
        return response_metadata.facts(self._record, accept, attempts, seconds)
