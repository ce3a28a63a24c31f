"""Parsers by vLLM's names of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from services.frontend.parsers.deltas import TextParser
from services.frontend.parsers.hermes import HermesParser
from services.frontend.parsers.llama3_json import Llama3JsonParser
from services.frontend.parsers.qwen3_coder import Qwen3CoderParser
from services.frontend.parsers.reasoning import END_OF_THINKING, THINK, ReasoningTokens, is_reasoning_open

Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """How a model marks its reasoning: <think> and </think>, and what is its own."""

    endings: tuple[str, ...] = ()
    """Other tags that end it, because they begin something else."""
    turns: tuple[str, ...] = ()
    """Tokens that begin or end a turn: what stands before them in a prompt is no part of the answer's turn."""

    def is_open(self, prompt_token_ids: Sequence[int], token_id: Callable[[str], int | None]) -> bool:
        """Whether an answer to this prompt begins with reasoning. `token_id`: of a token by its text."""
        turns = frozenset(found for turn in self.turns if (found := token_id(turn)) is not None)
        return is_reasoning_open(prompt_token_ids, token_id(THINK), token_id(END_OF_THINKING), turns)

    def are_tokens(self, token_id: Callable[[str], int | None]) -> bool:
        """Whether the tokens of a model's reasoning can be counted: one of its tokens ends it."""
        return token_id(END_OF_THINKING) is not None

    def tokens(self, prompt_token_ids: Sequence[int], token_id: Callable[[str], int | None]) -> ReasoningTokens:
        """Counts those of an answer to this prompt, of a model that they can be counted of."""
        ends = (found for tag in (END_OF_THINKING, *self.endings) if (found := token_id(tag)) is not None)
        return ReasoningTokens(token_id(THINK), frozenset(ends), is_open=self.is_open(prompt_token_ids, token_id))


TOOL_PARSERS: Final[Mapping[str, Callable[[Schemas], TextParser]]] = MappingProxyType(
    {
        "hermes": lambda _: HermesParser(),
        "llama3_json": lambda _: Llama3JsonParser(),
        "llama4_json": lambda _: Llama3JsonParser(),
        "qwen3_coder": Qwen3CoderParser,
        "qwen3_xml": Qwen3CoderParser,
    }
)
_TOOL_TAGS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        **dict.fromkeys(("hermes", "qwen3_coder", "qwen3_xml"), ("<tool_call>", "</tool_call>")),
        **dict.fromkeys(("llama3_json", "llama4_json"), ("<|python_tag|>",)),
    }
)
REASONING_PARSERS: Final[Mapping[str, ReasoningTags]] = MappingProxyType(
    {
        "deepseek_r1": ReasoningTags(),
        "qwen3": ReasoningTags(("<tool_call>",), ("<|im_start|>", "<|im_end|>")),
    }
)


def tool_parser(name: str, schemas: Schemas) -> TextParser:
    """For one answer. `schemas`: of the parameters of each tool."""
    return TOOL_PARSERS[name](schemas)


def reasoning_tags(name: str) -> ReasoningTags | None:
    """None where the model does not reason, as far as its worker knows."""
    return REASONING_PARSERS.get(name)


def tags_read(tool_parser: str, reasoning_parser: str) -> frozenset[str]:
    """What the parsers look for, which some models have as special tokens. Empty names: no such parser is needed."""
    reasoning = (THINK, END_OF_THINKING) if reasoning_parser else ()
    return frozenset((*_TOOL_TAGS.get(tool_parser, ()), *reasoning))
