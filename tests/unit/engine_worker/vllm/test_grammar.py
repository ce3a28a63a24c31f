"""A grammar that goes on behind what was emitted before, against vLLM's shapes."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from engine_worker.engines.vllm.connector.grammar import continue_grammar, tokens_behind_reasoning


@dataclass
class Grammar:
    accepts: bool = True
    fed: list[int] = field(default_factory=list)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        assert request_id == "vllm-7"
        self.fed += tokens
        return self.accepts


@dataclass
class Structured:
    _grammar: Any
    grammar: Any = None


@dataclass
class Request:
    structured_output_request: Structured | None
    request_id: str = "vllm-7"
    prompt_token_ids: tuple[int, ...] = (1, 2, 3, 10, 11, 12)


def test_a_grammar_is_fed_what_was_emitted_as_soon_as_it_is_compiled() -> None:
    compiling: Future[Grammar] = Future()
    structured = Structured(compiling)
    continue_grammar(Request(structured), 3)
    assert not structured.grammar.done()
    grammar = Grammar()
    compiling.set_result(grammar)
    assert structured.grammar.result() is grammar
    assert grammar.fed == [10, 11, 12]


def test_a_grammar_that_is_there_already_is_fed_at_once() -> None:
    structured = Structured(Grammar())
    continue_grammar(Request(structured), 1)
    assert structured.grammar.result().fed == [12]


def test_what_does_not_fit_and_what_does_not_compile_fail_the_request() -> None:
    structured = Structured(Grammar(accepts=False))
    continue_grammar(Request(structured), 2)
    with pytest.raises(ValueError, match="the 2 tokens that were emitted before do not fit"):
        structured.grammar.result()
    broken: Future[Grammar] = Future()
    structured = Structured(broken)
    continue_grammar(Request(structured), 2)
    broken.set_exception(RuntimeError("no such grammar"))
    with pytest.raises(RuntimeError, match="no such grammar"):
        structured.grammar.result()


def test_requests_that_begin_and_those_without_a_grammar_are_left_alone() -> None:
    structured = Structured(Grammar())
    continue_grammar(Request(structured), 0)
    assert structured.grammar is None
    continue_grammar(Request(None), 3)


@pytest.mark.parametrize(
    ("prompt", "emitted", "behind"),
    [
        ([1], [5, 6], 0),  # still reasoning
        ([1], [5, 9, 6, 7], 2),
        ([1], [5, 9], 0),
        ([1], [9, 5], 1),
        ([1, 9], [5, 6], 2),  # a template that has closed the reasoning
        ([1], [], 0),
    ],
)
def test_a_grammar_has_seen_what_stands_behind_the_reasoning(
    prompt: list[int], emitted: list[int], behind: int
) -> None:
    assert tokens_behind_reasoning(lambda tokens: 9 in tokens, prompt, emitted) == behind
