"""Prompts that vLLM makes in the process beside the frontend, because this frontend cannot."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import msgspec

from mesh.errors import ConfigurationError, RpcError
from penstock.v1 import parser_pb2
from services.frontend.errors import ApiError, bad_request, unavailable, upstream_failed
from services.frontend.parser_process.process import CALL_DEADLINE_S, ParserProcess
from services.frontend.text.chat_template import EFFORTS, effort_asking_for_none

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A chat as a prompt."""

    token_ids: list[int]
    text: str
    """What was tokenised; empty where the messages were written as tokens."""
    is_by_vllm: bool = False


class OutsidePrompts:
    """vLLM's rendering of one model's chats."""

    def __init__(
        self,
        process: ParserProcess | None,
        model: parser_pb2.ParserModel,
        folder: Callable[[], Awaitable[Path]],
        *,
        is_only_way: bool,
    ) -> None:
        """`process`: None where nobody waits for a prompt, and none is made. `folder` gives the directory with the
        model's files, of which `model` says none; it may raise RpcError and ConfigurationError. `is_only_way`: for all
        chats, since the frontend would render them otherwise."""
        self._process = process
        self._model = model
        self._folder = folder
        self.is_only_way = is_only_way
        self._effort_without_thinking = ""
        self._reason = ""
        """Why vLLM cannot render any chat of this model; empty: nobody knows of one."""

    @property
    def tells_tools(self) -> bool:
        """vLLM reads calls of tools in this model's answers, so that a chat may say how it wants to choose them."""
        return bool(self._model.tool_parser)

    async def load(self) -> None:
        """Make sure that there is a process that can do it. Raises ConfigurationError and RpcError."""
        if self._process is not None:
            await self._process.load(await self._located(), renders=True)

    async def effort_without_thinking(self) -> str:
        """See `ChatTemplate`. Raises ApiError (502, 503)."""
        if not self._effort_without_thinking:
            told = [await self._asked_with(effort) for effort in ("none", *EFFORTS)]
            self._effort_without_thinking = effort_asking_for_none(told[0], told[1:])
        return self._effort_without_thinking

    async def _asked_with(self, effort: str) -> RenderedChat | None:
        body = {"model": "", "messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort}
        try:
            return await self.render(msgspec.json.encode(body))
        except ApiError as error:
            if error.status == 400:
                return None
            raise

    async def render(self, body: bytes) -> RenderedChat | None:
        """The prompt of a chat with this body; None if vLLM has no way to render this model's, and it is not the only
        one who might. Raises ApiError: 400 for what vLLM refuses, 502, 503."""
        process = self._process
        if process is None:
            raise unavailable("There is no process here for vLLM to make a prompt of this chat.", "renderer_failed")
        if self._reason:
            return None
        try:
            request = parser_pb2.RenderChatRequest(model=await self._located(), body=body)
            rendered = await process.ask(lambda stub: stub.Render(request, timeout=CALL_DEADLINE_S))
        except (RpcError, ConfigurationError) as error:
            raise unavailable(f"vLLM cannot make a prompt of this chat now: {error}.", "renderer_failed") from error
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION and not self.is_only_way:
                self._reason = str(error.details())
                log.warning("vLLM cannot render the chats of a model", extra={"reason": self._reason})
                return None
            message = f"vLLM could not make a prompt of this chat: {error.details()}"
            raise upstream_failed(message, "renderer_failed") from error
        if rendered.HasField("refused"):
            refused = rendered.refused
            param = "messages" if refused.is_too_long or not refused.param else refused.param
            raise bad_request(refused.message, param, "context_length_exceeded" if refused.is_too_long else None)
        process.count_prompt()
        return RenderedChat(list(rendered.token_ids), rendered.text, is_by_vllm=True)

    async def _located(self) -> parser_pb2.ParserModel:
        if not self._model.directory:
            self._model.directory = str(await self._folder())
        return self._model
