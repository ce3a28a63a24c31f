"""What renders chats and reads answers, as the service knows it."""

from collections.abc import Sequence
from typing import Protocol

from penstock.v1 import parser_pb2


class ParserRefused(Exception):
    """The request is one that the parsers do not take; the message is for the client."""


class AnswerParser(Protocol):
    """Reads one answer. What it has told depends on the tokens so far alone: each is pushed by itself."""

    def push(self, text: str, token_ids: Sequence[int], *, is_last: bool) -> parser_pb2.ReadAnswerResponse:
        """What one token, with the text that it lets be shown, adds. Raises whatever the library raises."""


class Parsers(Protocol):
    """Rendering and parsers of any model, by name."""

    def load(self, model: parser_pb2.ParserModel) -> str:
        """Make sure that this model's parsers can be made; the version of the library. Blocks. Raises
        ConfigurationError."""

    async def load_renderer(self, model: parser_pb2.ParserModel) -> None:
        """The same for what renders its chats."""

    async def render(self, model: parser_pb2.ParserModel, body: bytes) -> parser_pb2.RenderChatResponse:
        """The prompt of a chat, or why there is none. Raises ConfigurationError."""

    def prepare(self, request: parser_pb2.PrepareAnswerRequest) -> parser_pb2.PrepareAnswerResponse:
        """What is changed of a request before it is generated. Raises ParserRefused and ConfigurationError."""

    def begin(self, begin: parser_pb2.BeginAnswer) -> AnswerParser:
        """For one answer. Raises ParserRefused and ConfigurationError."""
