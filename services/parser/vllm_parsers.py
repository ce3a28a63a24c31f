"""vLLM's tool and reasoning parsers, used as its own server of 0.32 uses them
(vllm/entrypoints/openai/chat_completion/serving.py): a parser for each answer, fed with every token by itself."""

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import vllm
import vllm.reasoning
import vllm.tool_parsers
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager
from vllm.tokenizers import get_tokenizer

from mesh.errors import ConfigurationError
from penstock.v1 import parser_pb2
from services.parser.interface import AnswerParser, ParserRefused
from services.parser.vllm_renderer import VllmRenderers

MAX_MODELS: Final = 16
"""Tokenizers that are kept; the least recently used is dropped beyond."""
_MISTRAL_ID_CHARACTERS: Final = 9
_LETTERS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_KIMI_IDS: Final = "functions."


class _Model:
    """A model's parser class with what its objects are made of."""

    def __init__(self, model: parser_pb2.ParserModel) -> None:
        self._config = _config(Path(model.directory))
        try:
            self._tokenizer: Any = get_tokenizer(model.directory, tokenizer_mode=model.tokenizer_mode or "auto")
            self._parser: Any = ParserManager.get_parser(
                tool_parser_name=model.tool_parser or None,
                reasoning_parser_name=model.reasoning_parser or None,
                enable_auto_tools=bool(model.tool_parser),
                is_harmony=self._config.hf_config.model_type == "gpt_oss",
                model_name="the model",
                tokenizer=self._tokenizer,
            )
        # Whatever vLLM and the tokenizer's library raise: the operator has to know which names, of which model.
        except Exception as error:
            names = " and ".join(filter(None, (model.tool_parser, model.reasoning_parser)))
            raise ConfigurationError(f"vLLM's parsers {names} cannot be used: {error}") from error
        assert self._parser is not None, "one name at least is given"

    def parser(self, request: ChatCompletionRequest) -> Any:
        kwargs = request.build_chat_params(None, "auto").chat_template_kwargs
        return self._parser(self._tokenizer, request.tools, chat_template_kwargs=kwargs, model_config=self._config)

    def adjusted(self, request: ChatCompletionRequest) -> ChatCompletionRequest:
        """As vLLM's renderer does (vllm/renderers/online_renderer.py)."""
        kind = self._parser
        if not (kind.always_adjust_request or kind.reasoning_parser_cls or request.tool_choice != "none"):
            return request
        adjusted: ChatCompletionRequest = self.parser(request).adjust_request(request=request)
        return adjusted


class VllmParsers:
    """`Parsers` of the installed vLLM."""

    def __init__(self) -> None:
        self._models: OrderedDict[tuple[str, ...], _Model] = OrderedDict()
        self._renderers = VllmRenderers()

    def load(self, model: parser_pb2.ParserModel) -> str:
        check_names(model.tool_parser, model.reasoning_parser)
        if model.tool_parser or model.reasoning_parser:
            self._model(model)
        return str(vllm.__version__)

    async def load_renderer(self, model: parser_pb2.ParserModel) -> None:
        await self._renderers.get(model)

    async def render(self, model: parser_pb2.ParserModel, body: bytes) -> parser_pb2.RenderChatResponse:
        return await self._renderers.render(model, body)

    def prepare(self, request: parser_pb2.PrepareAnswerRequest) -> parser_pb2.PrepareAnswerResponse:
        adjusted = self._adjusted(request.model, request.body, request.earlier_calls)
        structure = adjusted.extract_structured_outputs()
        fields = {} if structure is None else {name: value for name, value in asdict(structure).items() if value}
        fields = {name: value for name, value in fields.items() if not name.startswith("_")}
        return parser_pb2.PrepareAnswerResponse(
            structured_outputs=json.dumps(fields) if fields else "",
            shows_special_tokens=not adjusted.skip_special_tokens,
        )

    def begin(self, begin: parser_pb2.BeginAnswer) -> AnswerParser:
        request = self._adjusted(begin.model, begin.body, begin.earlier_calls)
        parser = self._model(begin.model).parser(request)
        if begin.is_whole:
            return _WholeAnswer(parser, request, begin)
        return _StreamedAnswer(parser, request, begin)

    def _adjusted(self, model: parser_pb2.ParserModel, body: str, earlier_calls: int) -> ChatCompletionRequest:
        made = self._model(model)
        try:
            request = ChatCompletionRequest.model_validate({**json.loads(body), "messages": _messages(earlier_calls)})
            return made.adjusted(request)
        # Each of dozens of parsers raises what it likes at a request that it cannot do.
        except Exception as error:
            raise ParserRefused(f"{type(error).__name__}: {error}") from error

    def _model(self, model: parser_pb2.ParserModel) -> _Model:
        key = (model.directory, model.tokenizer_mode, model.tool_parser, model.reasoning_parser)
        if key not in self._models:
            self._models[key] = _Model(model)
            if len(self._models) > MAX_MODELS:
                self._models.popitem(last=False)
        self._models.move_to_end(key)
        return self._models[key]


def check_names(tool_parser: str, reasoning_parser: str) -> None:
    """Raises ConfigurationError, with all that there are, for names that vLLM has not."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for name, manager, option in (
        (tool_parser, ToolParserManager, "--tool-call-parser"),
        (reasoning_parser, ReasoningParserManager, "--reasoning-parser"),
    ):
        known = sorted(manager.list_registered())
        if name and name not in known:
            raise ConfigurationError(f"{option} {name}: vLLM {vllm.__version__} knows {', '.join(known)}")


class _StreamedAnswer:
    def __init__(self, parser: Any, request: ChatCompletionRequest, begin: parser_pb2.BeginAnswer) -> None:
        self._parser = parser
        self._request = request
        self._prompt_token_ids = list(begin.prompt_token_ids)
        self._answer_id = begin.answer_id
        self._reasons = bool(begin.model.reasoning_parser)
        self._token_ids: list[int] = []

    def push(self, text: str, token_ids: Sequence[int], *, is_last: bool) -> parser_pb2.ReadAnswerResponse:
        delta = self._parser.parse_delta(text, list(token_ids), self._request, self._prompt_token_ids, finished=is_last)
        told = parser_pb2.ReadAnswerResponse()
        self._token_ids += token_ids
        if is_last and self._reasons:
            told.reasoning_tokens = self._parser.count_reasoning_tokens(self._token_ids)
        if delta is None:
            return told
        told.reasoning, told.content = delta.reasoning or "", delta.content or ""
        for call in delta.tool_calls or ():
            added = told.calls.add(index=call.index)
            if call.function is not None:
                added.arguments = call.function.arguments or ""
                if call.function.name is not None:
                    added.name = call.function.name
            added.id = _call_id(call.id, call.index, self._answer_id)
        return told


class _WholeAnswer:
    def __init__(self, parser: Any, request: ChatCompletionRequest, begin: parser_pb2.BeginAnswer) -> None:
        parser.set_prompt_token_ids(list(begin.prompt_token_ids))
        self._parser = parser
        self._request = request
        self._answer_id = begin.answer_id
        self._reasons = bool(begin.model.reasoning_parser)
        self._texts: list[str] = []
        self._token_ids: list[int] = []

    def push(self, text: str, token_ids: Sequence[int], *, is_last: bool) -> parser_pb2.ReadAnswerResponse:
        self._texts.append(text)
        self._token_ids += token_ids
        told = parser_pb2.ReadAnswerResponse()
        if not is_last:
            return told
        reasoning, content, calls = self._parser.parse(
            "".join(self._texts), self._request, enable_auto_tools=True, model_output_token_ids=self._token_ids
        )
        told.reasoning = (reasoning or "") if self._request.include_reasoning else ""
        told.content = content or ""
        if self._reasons:
            told.reasoning_tokens = self._parser.count_reasoning_tokens(self._token_ids)
        for index, call in enumerate(calls or ()):
            call_id = _call_id(call.id, index, self._answer_id)
            told.calls.add(index=index, name=call.name, arguments=call.arguments, id=call_id)
        return told


def _call_id(given: str | None, index: int, answer_id: str) -> str:
    """Of a call: what the model's format says, the same whenever an answer is read again; empty: any will do."""
    if given is None:
        return ""
    if given.startswith(_KIMI_IDS):
        return given
    if len(given) == _MISTRAL_ID_CHARACTERS and given.isalnum():  # drawn by chance, but templates want just this form
        number = int.from_bytes(blake2b(f"{answer_id}/{index}".encode(), digest_size=8).digest())
        return "".join(_LETTERS[number // 62**place % 62] for place in range(_MISTRAL_ID_CHARACTERS))
    return ""


def _messages(earlier_calls: int) -> list[dict[str, Any]]:
    """What the parsers look at of a conversation."""
    call = {"id": "call", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    before = [{"role": "assistant", "content": "", "tool_calls": [call] * earlier_calls}] if earlier_calls else []
    return [*before, {"role": "user", "content": ""}]


def _config(directory: Path) -> Any:
    """What the parsers look at of vLLM's ModelConfig. The whole one would have the model's code looked for."""
    path = directory / "config.json"
    content = json.loads(path.read_text()) if path.is_file() else {}
    text = content.get("text_config") or {}
    return SimpleNamespace(
        hf_config=SimpleNamespace(model_type=content.get("model_type", "")),
        hf_text_config=SimpleNamespace(model_type=text.get("model_type", content.get("model_type", ""))),
        hf_overrides=None,
        architecture=next(iter(content.get("architectures") or ()), None),
    )
