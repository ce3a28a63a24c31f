"""vLLM's own rendering of chats, used as its server without an engine uses it
(vllm/entrypoints/launchers/render of 0.32)."""

import asyncio
import logging
from collections import OrderedDict
from typing import Any, Final

from pydantic import ValidationError
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMValidationError
from vllm.renderers import renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer

from mesh.errors import ConfigurationError
from penstock.v1 import parser_pb2

log = logging.getLogger(__name__)

MAX_MODELS: Final = 16
"""Renderers that are kept; the least recently used is dropped beyond."""
_TOO_LONG: Final = frozenset(("input_tokens", "input_text"))
"""What vLLM calls the parameter where a prompt does not fit the model."""


class VllmRenderers:
    """A renderer for each model that needs one, made when it is first asked for."""

    def __init__(self) -> None:
        self._renderers: OrderedDict[bytes, OnlineRenderer] = OrderedDict()
        self._making = asyncio.Lock()

    async def get(self, model: parser_pb2.ParserModel) -> OnlineRenderer:
        """The model's. Others of the process go on while it is made. Raises ConfigurationError."""
        key = model.SerializeToString(deterministic=True)
        if key not in self._renderers:
            async with self._making:
                if key not in self._renderers:
                    self._renderers[key] = await asyncio.to_thread(_make, model)
                    if len(self._renderers) > MAX_MODELS:
                        self._renderers.popitem(last=False)
        self._renderers.move_to_end(key)
        return self._renderers[key]

    async def render(self, model: parser_pb2.ParserModel, body: bytes) -> parser_pb2.RenderChatResponse:
        """See `Parsers`."""
        renderer = await self.get(model)
        try:
            rendered = await renderer.render_chat(ChatCompletionRequest.model_validate_json(body))
        # Templates and encodings of dozens of models raise what they like at a chat that they cannot do.
        except Exception as error:
            log.debug("a chat is refused", exc_info=True)
            return parser_pb2.RenderChatResponse(refused=_refusal(error))
        if isinstance(rendered, ErrorResponse):
            refused = parser_pb2.RefusedChat(message=rendered.error.message, param=rendered.error.param or "")
            return parser_pb2.RenderChatResponse(refused=refused)
        _, (prompt,) = rendered
        return parser_pb2.RenderChatResponse(token_ids=prompt["prompt_token_ids"], text=prompt.get("prompt") or "")


def _make(model: parser_pb2.ParserModel) -> OnlineRenderer:
    try:
        arguments = AsyncEngineArgs(
            model=model.directory,
            tokenizer_mode=model.tokenizer_mode or "auto",
            max_model_len=model.max_model_len_tokens or None,
            language_model_only=True,  # images take the processor's files, and are expanded by the workers
        )
        config: Any = arguments.create_model_config()
        config.quantization = None  # nothing is computed here, so this machine need not be able to
        renderer = renderer_from_config(VllmConfig(model_config=config))
        return OnlineRenderer(
            model_config=config,
            renderer=renderer,
            request_logger=None,
            chat_template=None,
            chat_template_content_format="auto",
            enable_auto_tools=bool(model.tool_parser),
            tool_parser=model.tool_parser or None,
            reasoning_parser=model.reasoning_parser or None,
        )
    # Whatever vLLM and the tokenizer's library raise: the operator has to know of which model.
    except Exception as error:
        raise ConfigurationError(f"vLLM cannot render chats for this model: {error}") from error


def _refusal(error: Exception) -> parser_pb2.RefusedChat:
    if isinstance(error, VLLMValidationError):
        param = error.parameter or ""
        return parser_pb2.RefusedChat(message=error.args[0], param=param, is_too_long=param in _TOO_LONG)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        place = ".".join(str(each) for each in first["loc"] if isinstance(each, int) or each.isidentifier())
        return parser_pb2.RefusedChat(message=f"{place}: {first['msg']}", param=place)
    return parser_pb2.RefusedChat(message=str(error) or type(error).__name__)
