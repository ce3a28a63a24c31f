"""Reasoning apart from the answer: <think>...</think> before it, of which the first tag is often part of the prompt."""

from collections.abc import Sequence
from typing import Final

from services.frontend.parsers.deltas import DeltaBuilder, MessageDelta, TextParser
from services.frontend.parsers.tags import TagReader

THINK: Final = "<think>"
END_OF_THINKING: Final = "</think>"


def is_reasoning_open(
    prompt_token_ids: Sequence[int], begin_id: int | None, end_id: int | None, turn_ids: frozenset[int] = frozenset()
) -> bool:
    """Whether an answer to this prompt begins with reasoning. It does, unless the prompt's last turn holds a closed
    one, as templates write it for models that are not to think. `turn_ids`: tokens that begin or end a turn."""
    for token_id in reversed(prompt_token_ids):
        if token_id == end_id:
            return False
        if token_id == begin_id or token_id in turn_ids:
            return True
    return True


class ReasoningTokens:
    """Counts those of an answer's tokens that are reasoning; not the tags around it."""

    __slots__ = ("_begin_id", "_end_ids", "_is_open", "count")

    def __init__(self, begin_id: int | None, end_ids: frozenset[int], *, is_open: bool) -> None:
        """`end_ids`: tokens that end it, whatever they begin. `is_open`: the answer begins with reasoning."""
        self._begin_id = begin_id
        self._end_ids = end_ids
        self._is_open = is_open
        self.count = 0

    def push(self, token_ids: Sequence[int]) -> None:
        """The next tokens of the answer."""
        if not self._is_open:
            return
        for token_id in token_ids:
            if token_id in self._end_ids:
                self._is_open = False
                return
            self.count += token_id != self._begin_id


class ReasoningParser:
    """A `TextParser` that leaves what follows the reasoning to another one. It begins within the reasoning.

    An answer that never ends its reasoning is reasoning to its end, as in vLLM.
    """

    def __init__(self, answer: TextParser, ending_tags: tuple[str, ...] = ()) -> None:
        """`ending_tags`: end the reasoning too, and belong to what follows."""
        self._answer = answer
        self._tags = TagReader()
        self._ending_tags = ending_tags
        self._is_open = True

    def push(self, text: str) -> MessageDelta:
        if not self._is_open:
            return self._answer.push(text)
        to = DeltaBuilder()
        while text and self._is_open:
            reasoning, tag, text = self._tags.read(text, (THINK, END_OF_THINKING, *self._ending_tags))
            to.reason(reasoning)
            if tag in self._ending_tags:
                text = str(tag) + text
            self._is_open = tag is None or tag == THINK
        if not self._is_open and text:
            to.add(self._answer.push(text))
        return to.built()

    def finish(self) -> MessageDelta:
        to = DeltaBuilder()
        to.reason(self._tags.rest())
        to.add(self._answer.finish())
        return to.built()


class PlainText:
    """A `TextParser` for an answer without calls."""

    def push(self, text: str) -> MessageDelta:
        return MessageDelta(content=text)

    def finish(self) -> MessageDelta:
        return MessageDelta()
