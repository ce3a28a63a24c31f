"""Logprobs in OpenAI's two forms."""

from collections.abc import Sequence

from penstock.v1 import request_pb2
from services.frontend.answers.choice import TokenPosition
from services.frontend.answers.schema import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob
from services.frontend.text.model_text import ModelText

LEAST_LOGPROB = -9999.0
"""JSON has no infinity; OpenAI documents this value for very unlikely tokens."""


def chat_logprobs(positions: Sequence[TokenPosition], text: ModelText) -> ChatLogprobs:
    """`choices[].logprobs` of a chat completion."""
    return ChatLogprobs([_chat_entry(position.logprobs, text) for position in positions])


def completion_logprobs(positions: Sequence[TokenPosition], text: ModelText) -> CompletionLogprobs:
    """`choices[].logprobs` of a completion."""
    return CompletionLogprobs(
        tokens=[text.token_text(position.logprobs.chosen.token_id)[0] for position in positions],
        token_logprobs=[_finite(position.logprobs.chosen.logprob) for position in positions],
        top_logprobs=[
            {text.token_text(rival.token_id)[0]: _finite(rival.logprob) for rival in position.logprobs.top}
            for position in positions
        ],
        text_offset=[position.text_offset for position in positions],
    )


def _chat_entry(logprobs: request_pb2.PositionLogprobs, text: ModelText) -> ChatTokenLogprob:
    chosen = _top(logprobs.chosen, text)
    return ChatTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, [_top(rival, text) for rival in logprobs.top])


def _top(token: request_pb2.TokenLogprob, text: ModelText) -> TopLogprob:
    spelled, spelled_bytes = text.token_text(token.token_id)
    return TopLogprob(spelled, _finite(token.logprob), list(spelled_bytes))


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
