"""A cascade's answer over HTTP: nothing of a tier's answer is sent before it is accepted."""

import asyncio
from typing import Final

from starlette.types import Scope

from controlplane.model.cascade_record import CascadeRecord
from services.frontend.answers.format import AnswerHeader, WholeAnswer
from services.frontend.answers.format_choice import answer_format
from services.frontend.answers.sender import AnswerSender
from services.frontend.answers.sse import comment
from services.frontend.api.exchange import INSTANCE_HEADER, POLICY_HEADER, Exchange
from services.frontend.api.schema import ChatCompletionRequest, CompletionRequest
from services.frontend.api_keys import ApiKey
from services.frontend.cascade import told
from services.frontend.cascade.ascent import Accepted, Ascent
from services.frontend.service import FrontendService

KEEP_ALIVE_S: Final = 5.0
"""A streaming client that has got nothing for so long gets a comment, which its reader skips."""


class CascadeExchange(Exchange):
    """Tiers in turn, judged; then the accepted answer."""

    def __init__(
        self,
        service: FrontendService,
        request: ChatCompletionRequest | CompletionRequest,
        request_id: str,
        record: CascadeRecord,
        key: ApiKey | None,
        arrived_s: float,
    ) -> None:
        """Raises ApiError (400) for what the cascade cannot do."""
        super().__init__(service, request, request_id, record.name, key, arrived_s)
        self._record = record
        self._ascent = Ascent(service, record, request, request_id, arrived_s, self._left_s)

    async def _generate(self, sender: AnswerSender, scope: Scope) -> None:
        accepted = await self._wait(sender)
        answer = accepted.answer
        assert answer.finish is not None, "an answer that was given up is not accepted"
        sender.headers |= told.headers(accepted.facts)
        sender.headers[INSTANCE_HEADER] = answer.instance_id
        sender.headers[POLICY_HEADER] = answer.policy
        options = self._request.stream_options
        form = answer_format(self._request, self._header(accepted), answer.plan)
        whole = WholeAnswer(
            answer.text,
            answer.positions if self._wants_logprobs else (),
            answer.finish,
            told.summed([each.usage for each in accepted.answers]),
        )
        # The whole answer goes out at once, so this is its first token's time too.
        self._service.metrics.of(self._record.name).ttft.observe(self._service.clock() - self._arrived_s)
        if self._request.stream:
            await sender.stream_at_once(whole, form, options is not None and bool(options.include_usage))
        else:
            await sender.whole_at_once(whole, form)

    async def _wait(self, sender: AnswerSender) -> Accepted:
        """Until an answer is accepted; a stream's client is told meanwhile that it is still being worked on."""
        ascent = asyncio.ensure_future(self._ascent.run())
        try:
            while not (await asyncio.wait((ascent,), timeout=KEEP_ALIVE_S))[0]:
                if self._request.stream:
                    await sender.keep_alive(comment(self._ascent.doing))
            return ascent.result()
        finally:
            if not ascent.done():
                ascent.cancel()
                await asyncio.wait((ascent,))

    @property
    def _wants_logprobs(self) -> bool:
        if isinstance(self._request, ChatCompletionRequest):
            return bool(self._request.logprobs)
        return self._request.logprobs is not None

    def _header(self, accepted: Accepted) -> AnswerHeader:
        options = self._request.stream_options
        plan = accepted.answer.plan
        return AnswerHeader(
            request_id=self._request_id,
            created_unix_s=int(self._service.unix_time()),
            model=self._record.name,
            text=plan.model.text,
            logprobs=self._wants_logprobs,
            include_usage=options is not None and bool(options.include_usage),
            cascade=accepted.facts,
        )
