"""From the text of a chat's answers to messages: by the model's parsers, as far as the request needs them."""

from collections.abc import Callable
from dataclasses import dataclass

from xxhash import xxh3_128_hexdigest

from services.frontend.parsers.deltas import CallDelta, MessageDelta, TextParser
from services.frontend.parsers.forced import NamedParser, RequiredParser
from services.frontend.parsers.reasoning import PlainText, ReasoningParser, ReasoningTokens
from services.frontend.parsers.registry import reasoning_tags, tags_read, tool_parser
from services.frontend.requests.models import ServedModel
from services.frontend.requests.plan import GenerationPlan
from services.frontend.requests.schema import ChatCompletionRequest, GenerationRequest
from services.frontend.requests.tools import NamedToolChoice, argument_schemas, effective_choice


@dataclass(frozen=True, slots=True)
class MessageReading:
    """How all answers to one request are read."""

    make: Callable[[], TextParser] | None
    """None: the parser process has read them."""
    is_named: bool
    """The client has named the function: that it was called is no reason to stop, as OpenAI sees it."""
    has_reasoning: bool
    """Reasoning is shown. Otherwise it is left out."""
    max_calls: int | None


class MessageText:
    """One answer while it is read."""

    def __init__(self, reading: MessageReading) -> None:
        self._reading = reading
        self._parser = None if reading.make is None else reading.make()
        self._has_calls = False

    def read(self, text: str, finish: str | None, message: MessageDelta | None) -> MessageDelta:
        """What a piece of the answer adds to its message. `message`: what the parser process says of it."""
        if self._parser is None:
            delta = self._shown(message or MessageDelta())
            self._has_calls = self._has_calls or bool(delta.calls)
            return delta
        delta = self._shown(self._parser.push(text))
        if finish is not None:
            last = self._shown(self._parser.finish())
            calls = (*delta.calls, *last.calls)
            delta = MessageDelta(delta.reasoning + last.reasoning, delta.content + last.content, calls)
        self._has_calls = self._has_calls or bool(delta.calls)
        return delta

    @property
    def ended_by_calls(self) -> bool:
        """Where the answer has ended by itself, it was to have tools called."""
        return self._has_calls and not self._reading.is_named

    def _shown(self, delta: MessageDelta) -> MessageDelta:
        most = self._reading.max_calls
        calls = delta.calls if most is None else tuple(call for call in delta.calls if call.index < most)
        reasoning = delta.reasoning if self._reading.has_reasoning else ""
        return MessageDelta(reasoning, delta.content, calls, delta.reasoning_tokens)


def message_reading(request: ChatCompletionRequest, plan: GenerationPlan) -> MessageReading | None:
    """How answers to it are read; None: what the model says is the content."""
    model, prompt_token_ids = plan.model, plan.prompts[0].token_ids
    choice = effective_choice(request.tools or (), request.tool_choice)
    if plan.read_by is not None:
        return MessageReading(
            None,
            is_named=isinstance(choice, NamedToolChoice),
            has_reasoning=True,  # or it was left out there
            max_calls=1 if request.parallel_tool_calls is False else None,
        )
    make = _answer_parser(request, model)
    tags = reasoning_tags(model.reasoning_parser)
    if tags is not None and tags.is_open(prompt_token_ids, model.text.token_id):
        make_answer, endings = make or PlainText, tags.endings if choice == "auto" else ()
        make = lambda: ReasoningParser(make_answer(), endings)  # noqa: E731
    if make is None:
        return None
    return MessageReading(
        make,
        is_named=isinstance(choice, NamedToolChoice),
        has_reasoning=request.include_reasoning is not False,
        max_calls=1 if request.parallel_tool_calls is False else None,
    )


def reasoning_tokens(request: GenerationRequest, plan: GenerationPlan, index: int) -> ReasoningTokens | None:
    """Counts those of a choice; None where the parser process does, or nobody can tell."""
    tags = reasoning_tags(plan.model.reasoning_parser)
    if tags is None or plan.read_by is not None or not tells_reasoning_tokens(request, plan):
        return None
    return tags.tokens(plan.prompts[index // plan.n].token_ids, plan.model.text.token_id)


def tells_reasoning_tokens(request: GenerationRequest, plan: GenerationPlan) -> bool:
    """Whether the usage says how many tokens are reasoning."""
    if plan.read_by is not None:
        return plan.model.outside is not None and plan.model.outside.reads_reasoning
    tags = reasoning_tags(plan.model.reasoning_parser)
    return tags is not None and isinstance(request, ChatCompletionRequest) and tags.are_tokens(plan.model.text.token_id)


def tokens_shown(request: GenerationRequest, model: ServedModel) -> frozenset[str]:
    """Special tokens that are part of the text of the answers, because their parsers look for them."""
    if not isinstance(request, ChatCompletionRequest) or model.outside is not None:
        return frozenset()
    is_auto = bool(request.tools) and effective_choice(request.tools or (), request.tool_choice) == "auto"
    return tags_read(model.tool_call_parser if is_auto else "", model.reasoning_parser)


def _answer_parser(request: ChatCompletionRequest, model: ServedModel) -> Callable[[], TextParser] | None:
    tools = request.tools or ()
    choice = effective_choice(tools, request.tool_choice)
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        return lambda: NamedParser(name)
    if choice == "required":
        return RequiredParser
    if choice == "auto" and tools:
        schemas = argument_schemas(tools)
        return lambda: tool_parser(model.tool_call_parser, schemas)
    return None


def call_id(request_id: str, choice: int, call: CallDelta) -> str:
    """Of a call: the same at whichever frontend a stream is resumed."""
    return call.id or f"call_{xxh3_128_hexdigest(f'{request_id}/{choice}/{call.index}'.encode())[:24]}"
