"""A request's way up a cascade: asks tiers and judges as the state machine says."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from controlplane.model.cascade_record import CascadeRecord
from controlplane.protocols.cascade.terms import CascadeTerms, WithoutJudge, thresholds_for
from controlplane.protocols.cascade.walk import Accept, Action, CascadeWalk, Fail, Generate, Judge
from mesh.errors import ConfigurationError, JudgeUnavailable
from penstock.v1 import cascade_pb2
from services.frontend.api.answer_schema import CascadeFacts
from services.frontend.api.errors import ApiError, bad_request, model_not_found, unavailable
from services.frontend.api.schema import CascadeHints, ChatCompletionRequest, CompletionRequest
from services.frontend.cascade import told
from services.frontend.cascade.tier_answer import TierAnswer, ask_tier
from services.frontend.service import FrontendService

log = logging.getLogger(__name__)

CONFIDENCE: Final = "confidence"
"""The judge that needs the log-probabilities of the answer's tokens."""
MAX_SAMPLED_BYTES: Final = 65_536
"""Requests beyond are counted, but not offered as samples of the workload."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The answer for the client."""

    answer: TierAnswer
    answers: tuple[TierAnswer, ...]
    """Of all tiers that answered, lowest first."""
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
        left_s: Callable[[], float],
    ) -> None:
        """Raises ApiError (400) for hints that this cascade cannot follow."""
        self._service = service
        self._record = record
        self._request = request
        self._request_id = request_id
        self._arrived_s = arrived_s
        self._left_s = left_s
        self._walk = CascadeWalk(request_id, _terms(service, record, request, arrived_s))
        self._answers: dict[int, TierAnswer] = {}
        self._judges: dict[int, str] = {}
        self._failures: dict[int, ApiError] = {}
        self._is_counted = False
        """Whether the cascade router has been told of the request, for its samples of the workload."""
        self.doing = ""
        """In words, for keep-alives."""

    async def run(self) -> Accepted:
        """Raises the last tier's ApiError if no tier could answer."""
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
            log.warning(
                "a tier could not answer",
                extra={"request_id": self._request_id, "tier": model_name, "error": error.message},
            )
            return self._walk.failed(tier, error.message, self._service.clock())
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
        request = msgspec.structs.replace(self._request, model=model_name, penstock=None)
        with_logprobs = CONFIDENCE in self._record.judges and self._walk.may_be_judged
        # The first request to a tier has the client's request id, so that it is found by it everywhere.
        is_first = tier == self._walk.terms.first_tier
        request_id = self._request_id if is_first else f"{self._request_id}-tier{tier}"
        if tier in self._answers:  # given up, and needed after all
            request_id += "-again"
        metrics = self._service.metrics.cascade
        labels = (self._record.name, model_name)
        ttft = metrics.tier_ttft.labels(*labels)
        # Only of the judge that is asked first: the thresholds are for its scores.
        gives_up = self._record.judges[:1] == (CONFIDENCE,) and self._walk.may_give_up
        give_up_below = self._walk.terms.thresholds[tier] if gives_up else 0.0
        answer = await ask_tier(
            self._service, request, request_id, model, began_s, self._left_s, ttft, with_logprobs, give_up_below
        )
        metrics.tier_seconds.labels(*labels).observe(answer.seconds)
        return answer

    def _gave_up(self, tier: int) -> Action:
        """Nothing waits for the judge, who is told for the sake of those who count and sample."""
        answer = self._answers[tier]
        self._judges[tier] = CONFIDENCE
        self._service.judging.tell(self._judge_request(tier, answer))
        return self._walk.gave_up(tier, answer.confidence)

    def _stays_unjudged(self, tier: int) -> None:
        """The tier's time is complete without a judgement, and a request that had no answer before is still to be
        counted."""
        answer = self._answers[tier]
        self._service.cascades.times.took(self._record.tiers[tier], answer.seconds)
        if not self._is_counted:
            self._service.judging.tell(self._sample_request(tier, answer))

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
            score = await self._service.judging.judge(self._judge_request(tier, answer), left_s)
        except JudgeUnavailable as error:
            self._service.metrics.cascade.unjudged.labels(self._record.name).inc()
            log.warning("an answer could not be judged", extra={"request_id": self._request_id, "error": str(error)})
            self._judges[tier] = f"none: {error}"
            return self._walk.not_judged(tier, self._service.clock())
        now_s = self._service.clock()
        self._service.cascades.times.took(self._record.tiers[tier], answer.seconds + now_s - began_s)
        self._judges[tier] = score.judge
        return self._walk.judged(tier, score.score, now_s)

    def _judge_request(self, tier: int, answer: TierAnswer) -> cascade_pb2.JudgeRequest:
        request = self._sample_request(tier, answer)
        request.sample_only = False
        request.prompt = _prompt_text(self._request)
        request.answer = answer.text
        request.given_up = answer.given_up
        if CONFIDENCE in self._record.judges:
            request.token_logprobs.extend(answer.token_logprobs)
        return request

    def _sample_request(self, tier: int, answer: TierAnswer) -> cascade_pb2.JudgeRequest:
        """Counts the client's request, unless that was done with an answer before."""
        is_first, self._is_counted = not self._is_counted, True
        sample = msgspec.json.encode(self._request) if is_first else b""
        if len(sample) > MAX_SAMPLED_BYTES:
            sample = b""
        return cascade_pb2.JudgeRequest(
            request_id=self._request_id,
            prompt=_prompt_text(self._request) if sample else "",
            tier=self._record.tiers[tier],
            cascade=self._record.name,
            request_json=sample,
            chat=isinstance(self._request, ChatCompletionRequest),
            prompt_tokens=answer.usage.prompt_tokens,
            completion_tokens=answer.usage.completion_tokens,
            sample_only=True,
            first_answer=is_first,
        )

    def _accepted(self, accept: Accept) -> Accepted:
        answer = self._answers[accept.tier]
        seconds = self._service.clock() - self._arrived_s
        failures = {tier: error.message for tier, error in self._failures.items()}
        told_facts = told.facts(self._record, accept, self._answers, self._walk.scores, self._judges, failures, seconds)
        self._service.metrics.cascade.answers.labels(
            self._record.name, self._record.tiers[accept.tier], accept.because.value
        ).inc()
        return Accepted(answer, tuple(self._answers[tier] for tier in sorted(self._answers)), told_facts)


def _terms(
    service: FrontendService,
    record: CascadeRecord,
    request: ChatCompletionRequest | CompletionRequest,
    arrived_s: float,
) -> CascadeTerms:
    hints = request.penstock or CascadeHints()
    if (request.n or 1) > 1 or (isinstance(request, CompletionRequest) and _prompts(request) > 1):
        raise bad_request(f"`{record.name}` is a cascade, which gives one answer to one prompt.", "n")
    max_tier = None
    if hints.max_tier is not None:
        if hints.max_tier not in record.tiers:
            raise bad_request(
                f"`{hints.max_tier}` is no tier of `{record.name}`; its tiers are {', '.join(record.tiers)}.",
                "penstock.max_tier",
            )
        max_tier = record.tiers.index(hints.max_tier)
    try:
        return CascadeTerms(
            thresholds=thresholds_for(record.thresholds, hints.quality),
            expected_s=service.cascades.times.expected_s(record),
            deadline_s=None if hints.latency_s is None else arrived_s + hints.latency_s,
            max_tier=max_tier,
            without_judge=WithoutJudge(record.without_judge),
        )
    except ConfigurationError as error:
        raise unavailable(f"The cascade `{record.name}` cannot be served: {error}.") from error


def _prompts(request: CompletionRequest) -> int:
    prompt = request.prompt
    return len(prompt) if isinstance(prompt, list) and not all(isinstance(item, int) for item in prompt) else 1


def _prompt_text(request: ChatCompletionRequest | CompletionRequest) -> str:
    """As a judge reads it: the question alone where there is only one message, else the conversation."""
    if isinstance(request, CompletionRequest):
        prompt = request.prompt[0] if isinstance(request.prompt, list) and request.prompt else request.prompt
        return prompt if isinstance(prompt, str) else str(prompt)
    texts = [
        (message.role, message.content or "")
        if isinstance(message.content, str | None)
        else (message.role, "\n".join(part.text or "" for part in message.content))
        for message in request.messages
    ]
    return texts[0][1] if len(texts) == 1 else "\n\n".join(f"{role}: {text}" for role, text in texts)
