"""What the cascade router is sent of a client's request."""

from typing import Final

import msgspec

from controlplane.model.cascade_record import CascadeRecord
from penstock.v1 import cascade_pb2
from services.frontend.cascade.tier_answer import TierAnswer
from services.frontend.requests.schema import ChatCompletionRequest, CompletionRequest

CONFIDENCE: Final = "confidence"
"""The judge that needs the log-probabilities of the answer's tokens."""
MAX_SAMPLED_BYTES: Final = 65_536
"""Requests beyond are counted, but not offered as samples of the workload."""


class JudgeRequests:
    """Of one client's request, which the first of them counts."""

    def __init__(
        self, record: CascadeRecord, request: ChatCompletionRequest | CompletionRequest, request_id: str
    ) -> None:
        self._record = record
        self._request = request
        self._request_id = request_id
        self.is_counted = False
        """Whether the router has been told of the client's request."""

    def to_judge(self, tier: int, answer: TierAnswer) -> cascade_pb2.JudgeRequest:
        """Asks for the score of a tier's answer."""
        request = self.to_count(tier, answer)
        request.sample_only = False
        request.prompt = _prompt_text(self._request, answer)
        request.answer = answer.text
        request.given_up = answer.given_up
        if CONFIDENCE in self._record.judges:
            request.token_logprobs.extend(answer.token_logprobs)
        return request

    def to_count(self, tier: int, answer: TierAnswer) -> cascade_pb2.JudgeRequest:
        """Says that the client's request was answered, without a judgement."""
        is_first, self.is_counted = not self.is_counted, True
        sample = msgspec.json.encode(self._request) if is_first else b""
        if len(sample) > MAX_SAMPLED_BYTES:
            sample = b""
        return cascade_pb2.JudgeRequest(
            request_id=self._request_id,
            prompt=_prompt_text(self._request, answer) if sample else "",
            tier=self._record.tiers[tier],
            cascade=self._record.name,
            request_json=sample,
            chat=isinstance(self._request, ChatCompletionRequest),
            prompt_tokens=answer.usage.prompt_tokens,
            completion_tokens=answer.usage.completion_tokens,
            sample_only=True,
            first_answer=is_first,
        )


def _prompt_text(request: ChatCompletionRequest | CompletionRequest, answer: TierAnswer) -> str:
    """As a judge reads it: the question alone where there is only one message, else the conversation; of token ids the
    text that they are to the tier that answered."""
    if isinstance(request, CompletionRequest):
        prompt = request.prompt[0] if isinstance(request.prompt, list) else request.prompt
        return prompt if isinstance(prompt, str) else answer.plan.model.text.decode(answer.plan.prompts[0].token_ids)
    texts = [
        (message.role, "\n".join(part.text or "" for part in message.content))
        if isinstance(message.content, list)
        else (message.role, message.content or "")
        for message in request.turns()
    ]
    return texts[0][1] if len(texts) == 1 else "\n\n".join(f"{role}: {text}" for role, text in texts)
