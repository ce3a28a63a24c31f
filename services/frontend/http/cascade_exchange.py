"""A cascade's answer over HTTP: nothing of a tier's answer is sent before it is sure to be accepted."""

from collections.abc import Sequence

import msgspec
from starlette.types import Scope

from controlplane.model.cascade_record import CascadeRecord
from services.frontend.answers.formats import AnswerFormat, AnswerHeader, WholeAnswer, answer_format
from services.frontend.answers.schema import CascadeFacts, TierFacts
from services.frontend.answers.sender import AnswerSender
from services.frontend.cascade import response_metadata
from services.frontend.cascade.executor import Accepted, CascadeExecutor
from services.frontend.cascade.hints import terms_of
from services.frontend.cascade.keep_alives import KeepAlives
from services.frontend.cascade.live_stream import LiveStream
from services.frontend.cascade.service import CascadeService
from services.frontend.http.exchange import INSTANCE_HEADER, POLICY_HEADER, Exchange
from services.frontend.requests.api_keys import ApiKey
from services.frontend.requests.ended import TierOutcome, Tokens
from services.frontend.requests.plan import GenerationPlan
from services.frontend.requests.schema import ChatCompletionRequest, GenerationRequest
from services.frontend.requests.usage import ModelUsage


class CascadeExchange(Exchange):
    """Tiers in turn, judged; then the accepted answer, as it comes if the client streams."""

    def __init__(
        self,
        service: CascadeService,
        request: GenerationRequest,
        request_id: str,
        record: CascadeRecord,
        key: ApiKey | None,
        arrived_s: float,
    ) -> None:
        """Raises ApiError (400) for what the cascade cannot do."""
        super().__init__(service.frontend, request, request_id, record.name, key, arrived_s)
        self._cascade_service = service
        self._record = record
        self._terms = terms_of(request, record, service.cascades.latencies, arrived_s)
        self._created_unix_s = int(service.frontend.unix_time())

    async def _generate(self, sender: AnswerSender, scope: Scope) -> None:
        self.on_planned()  # what a prompt is depends on the tier
        executor = CascadeExecutor(
            self._cascade_service,
            self._record,
            self._request,
            self.request_id,
            self._arrived_s,
            self._terms,
            self._client(scope),
        )
        try:
            await self._answer(executor, sender)
        finally:  # also where the client has left, or no tier could answer
            usages = [
                ModelUsage(model, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
                for model, usage in executor.usages
            ]
            self._progress.tier_usage = usages
            self._progress.tokens = Tokens(
                sum(usage.prompt_tokens for usage in usages),
                sum(usage.cached_tokens for usage in usages),
                sum(usage.output_tokens for usage in usages),
            )

    async def _answer(self, executor: CascadeExecutor, sender: AnswerSender) -> None:
        if not self._request.stream:
            accepted = await executor.run(None)
            self._note(accepted)
            await self._send_at_once(sender, accepted)
            return

        def announce(facts: CascadeFacts, instance_id: str, policy: str) -> None:
            self._announce(sender, facts, instance_id, policy)

        async with KeepAlives(sender, lambda: executor.doing) as keep_alives:
            live = LiveStream(sender, keep_alives, self._form, announce, self._include_usage)
            accepted = await executor.run(live)
            self._note(accepted)
        if not live.began:
            await self._send_at_once(sender, accepted)

    @property
    def _models(self) -> Sequence[str]:
        return tuple(self._record.tiers)

    def _note(self, accepted: Accepted) -> None:
        progress, answer, facts = self._progress, accepted.answer, accepted.facts
        progress.choices = 1
        progress.tier, progress.because = facts.tier, facts.because
        progress.tiers = [_outcome(tier) for tier in facts.tiers]
        progress.instance_id, progress.policy = answer.instance_id, answer.policy

    async def _send_at_once(self, sender: AnswerSender, accepted: Accepted) -> None:
        answer = accepted.answer
        assert answer.finish is not None, "an answer that was given up is not accepted"
        self._announce(sender, accepted.facts, answer.instance_id, answer.policy)
        positions = answer.positions if self._wants_logprobs else ()
        whole = WholeAnswer(answer.text, positions, answer.finish, accepted.usage, answer.stop_reason)
        form = self._form(answer.plan, accepted.facts)
        if self._request.stream:
            await sender.stream_at_once(whole, form, self._include_usage)
        else:
            await sender.whole_at_once(whole, form)

    def _announce(self, sender: AnswerSender, facts: CascadeFacts, instance_id: str, policy: str) -> None:
        """The client's first token is about to be sent."""
        sender.headers |= response_metadata.headers(facts)
        sender.headers[INSTANCE_HEADER] = instance_id
        sender.headers[POLICY_HEADER] = policy
        self._progress.first_token_s = self._service.clock()
        self._service.metrics.of(self._record.name).ttft.observe(self._progress.first_token_s - self._arrived_s)

    def _form(self, plan: GenerationPlan, facts: CascadeFacts | msgspec.UnsetType) -> AnswerFormat:
        header = AnswerHeader(
            request_id=self.request_id,
            created_unix_s=self._created_unix_s,
            model=self._record.name,
            text=plan.model.text,
            logprobs=self._wants_logprobs,
            include_usage=self._include_usage,
            cascade=facts,
        )
        return answer_format(self._request, header, plan)

    @property
    def _wants_logprobs(self) -> bool:
        if isinstance(self._request, ChatCompletionRequest):
            return bool(self._request.logprobs)
        return self._request.logprobs is not None


def _outcome(tier: TierFacts) -> TierOutcome:
    ended = "given up: it could not score enough" if tier.given_up else ""
    if tier.abandoned:
        ended = "abandoned: it was begun ahead and not needed"
    return TierOutcome(tier.model, tier.score, tier.seconds, tier.failure or ended)
