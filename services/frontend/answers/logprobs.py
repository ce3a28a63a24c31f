"""Logprobs in the forms of chats and completions."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from penstock.v1 import request_pb2
from services.frontend.answers.choice import TokenPosition
from services.frontend.answers.schema import (
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from services.frontend.text.model_text import ModelText

LEAST_LOGPROB: Final = -9999.0
"""JSON has no infinity; OpenAI documents this value for very unlikely tokens."""


class Speller:
    """How logprobs name a token."""

    def __init__(self, text: ModelText, *, by_id: bool = False) -> None:
        """`by_id`: as `return_tokens_as_token_ids` asks for it."""
        self.text = text
        self._by_id = by_id

    def __call__(self, token_id: int) -> tuple[str, bytes]:
        """The name, and the bytes that the token stands for."""
        spelled, spelled_bytes = self.text.token_text(token_id)
        return (f"token_id:{token_id}" if self._by_id else spelled), spelled_bytes


def completion_logprobs(positions: Sequence[TokenPosition], spell: Speller, offset: int) -> CompletionLogprobs:
    """`choices[].logprobs` of a completion; `text_offset` begins at `offset` and counts the names of the tokens, which
    are not always their text: vLLM's reading."""
    tokens = [spell(position.logprobs.chosen.token_id)[0] for position in positions]
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[_finite(position.logprobs.chosen.logprob) for position in positions],
        top_logprobs=[_rivals(position.logprobs, spell) for position in positions],
        text_offset=_offsets(tokens, offset),
    )


def echoed_logprobs(
    prompt: Sequence[int], logprobs: Sequence[request_pb2.PositionLogprobs], spell: Speller
) -> CompletionLogprobs:
    """Those of an echoed prompt, of whose first token nothing is known."""
    tokens = [spell(token_id)[0] for token_id in prompt]
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[None, *(_finite(position.chosen.logprob) for position in logprobs)],
        top_logprobs=[None, *(_rivals(position, spell) for position in logprobs)],
        text_offset=_offsets(tokens, 0),
    )


def _offsets(tokens: Sequence[str], first: int) -> list[int]:
    return list(accumulate(map(len, tokens), initial=first))[:-1]


def prompt_logprobs(logprobs: Sequence[request_pb2.PositionLogprobs], text: ModelText) -> PromptLogprobs | None:
    """vLLM's `prompt_logprobs`; null where they were not asked for."""
    return [None, *(_prompt_entry(position, text) for position in logprobs)] if logprobs else None


def _prompt_entry(logprobs: request_pb2.PositionLogprobs, text: ModelText) -> dict[str, PromptLogprob]:
    chosen: dict[int, tuple[float, int | None]] = {
        logprobs.chosen.token_id: (logprobs.chosen.logprob, logprobs.chosen.rank or None)
    }
    ranked = {rival.token_id: (rival.logprob, rank) for rank, rival in enumerate(logprobs.top, 1)}
    return {
        str(token_id): PromptLogprob(_finite(logprob), rank, text.token_text(token_id)[0])
        for token_id, (logprob, rank) in (chosen | ranked).items()
    }


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def chat_entry(logprobs: request_pb2.PositionLogprobs, spell: Speller) -> ChatTokenLogprob:
    chosen = _top(logprobs.chosen, spell)
    return ChatTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, [_top(rival, spell) for rival in logprobs.top])


def _top(token: request_pb2.TokenLogprob, spell: Speller) -> TopLogprob:
    spelled, spelled_bytes = spell(token.token_id)
    return TopLogprob(spelled, _finite(token.logprob), list(spelled_bytes))


def _rivals(logprobs: request_pb2.PositionLogprobs, spell: Speller) -> dict[str, float] | None:
    """The chosen token and its rivals: vLLM's reading of `top_logprobs`."""
    return {spell(each.token_id)[0]: _finite(each.logprob) for each in (logprobs.chosen, *logprobs.top)}


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
