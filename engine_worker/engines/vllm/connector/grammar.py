"""Structured output that goes on: the grammar of a continued request is given the tokens that were emitted before.

vLLM compiles a grammar for each request and feeds it what that request generates. A continued request is a new one to
vLLM, whose prompt ends with the emitted tokens, so its grammar would begin anew: of 61 cuts through an answer none went
on rightly. Here the grammar's own future is replaced, as the request enters vLLM's queue, by one that compiles and then
feeds it the emitted tokens, in the thread that compiled. Wrapping `StructuredOutputManager._create_grammar` by a plugin
works as well, and depends on more; feeding it in `get_num_new_matched_tokens`, which may be called again, would stall
the engine loop.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from inspect import signature
from typing import Any


def replay_obstacle() -> str | None:
    """What this relies on that the installed vLLM does not have; None if all is there. Imports vLLM."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
    from vllm.v1.structured_output.request import StructuredOutputRequest

    if "request" not in _parameters(getattr(KVConnectorBase_V1, "on_new_request", None)):
        return "its KV connectors are not told of new requests (`on_new_request`)"
    if "_grammar" not in getattr(StructuredOutputRequest, "__dataclass_fields__", {}):
        return "a request no longer keeps its grammar in `StructuredOutputRequest._grammar`"
    grammar = getattr(StructuredOutputRequest, "grammar", None)
    if not isinstance(grammar, property) or grammar.fset is None:
        return "`StructuredOutputRequest.grammar` cannot be set"
    if _parameters(getattr(StructuredOutputGrammar, "accept_tokens", None))[1:] != ["request_id", "tokens"]:
        return "`StructuredOutputGrammar.accept_tokens` does not take a request's id and tokens"
    return None


def continue_grammar(request: Any, emitted_tokens: int) -> None:
    """Have the request's grammar go on behind the last so many tokens of its prompt. Call it once, before the request
    is scheduled. Tokens that do not fit the grammar fail this request and no other."""
    structured = request.structured_output_request
    if structured is None or not emitted_tokens:
        return
    emitted = list(request.prompt_token_ids[-emitted_tokens:])
    structured.grammar = chained(structured._grammar, lambda grammar: _replayed(grammar, request.request_id, emitted))


def tokens_behind_reasoning(
    has_ended: Callable[[list[int]], bool],
    prompt_token_ids: Sequence[int],
    emitted_token_ids: Sequence[int],
    is_content: Callable[[list[int]], bool] = lambda _: False,
) -> int:
    """How many of the emitted tokens stand behind the reasoning, which no grammar sees. `has_ended`: whether it has,
    at the end of such tokens, by vLLM's parser of it; `is_content`: whether the token that ends it, the first one of
    these, is itself what follows, such as the beginning of a call."""
    prompt, emitted = list(prompt_token_ids), list(emitted_token_ids)
    # It ends once; each look at it may read all tokens, and there may be thousands.
    ended_at = bisect_left(range(len(emitted)), True, key=lambda tokens: has_ended(prompt + emitted[:tokens]))
    if 0 < ended_at <= len(emitted) and is_content(emitted[ended_at - 1 :]):
        ended_at -= 1
    return len(emitted) - ended_at


def ends_by_content(reasoner: Any) -> Callable[[list[int]], bool]:
    """See `tokens_behind_reasoning`, by vLLM's parser of the reasoning (its structured output manager asks so)."""
    find = getattr(reasoner, "find_reasoning_end", None)
    if find is None or not getattr(reasoner, "reasoning_end_token_ids", None):
        return lambda _: False

    def is_content(tokens: list[int]) -> bool:
        end = find(tokens[:1])
        return end is not None and bool(end.implicit)

    return is_content


def chained(compiling: Any, then: Callable[[Any], Any]) -> "Future[Any]":
    """A future of what `then` makes of the grammar that `compiling` brings: a future, or a grammar that is there."""
    following: Future[Any] = Future()

    def compiled(done: "Future[Any]") -> None:
        try:
            following.set_result(then(done.result()))
        # Whatever went wrong in another thread is told where the grammar is asked for.
        except BaseException as error:  # noqa: BLE001
            following.set_exception(error)

    if not isinstance(compiling, Future):
        there: Future[Any] = Future()
        there.set_result(compiling)
        compiling = there
    compiling.add_done_callback(compiled)
    return following


def _replayed(grammar: Any, request_id: str, emitted: Sequence[int]) -> Any:
    if not grammar.accept_tokens(request_id, emitted):
        raise ValueError(f"the {len(emitted)} tokens that were emitted before do not fit the grammar of {request_id}")
    return grammar


def _parameters(function: Any) -> list[str]:
    return list(signature(function).parameters) if callable(function) else []
