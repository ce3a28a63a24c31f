"""A parser process without vLLM: thoughts end with `|`, calls are written [name:arguments], a chat is rendered to what
its messages hold. Some words break it."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from mesh.errors import ConfigurationError
from penstock.v1 import parser_pb2
from services.parser.__main__ import run
from services.parser.interface import ParserRefused

KNOWN = "brackets"


class FakeParsers:
    def load(self, model: parser_pb2.ParserModel) -> str:
        if model.tool_parser not in ("", KNOWN):
            raise ConfigurationError(f"--tool-call-parser {model.tool_parser}: there is {KNOWN}")
        assert os.path.exists(f"{model.directory}/tokenizer.json")
        return "fake"

    async def load_renderer(self, model: parser_pb2.ParserModel) -> None:
        if model.tokenizer_mode not in ("", KNOWN):
            raise ConfigurationError(f"tokenizer_mode {model.tokenizer_mode}: there is {KNOWN}")

    async def render(self, model: parser_pb2.ParserModel, body: bytes) -> parser_pb2.RenderChatResponse:
        config = Path(model.directory, "config.json")
        if config.exists() and "unknown" in config.read_text():
            raise ConfigurationError("there is no way to render this model")
        asked = json.loads(body)
        said = [f"{message['role']}={message.get('content')}" for message in asked["messages"]]
        given = [f"{name}:{asked[name]}" for name in sorted(asked.keys() - {"messages", "model"})]
        text = " ".join([*said, *given])
        if "§die" in text:
            died = Path(model.directory, "died")
            if not died.exists():
                died.touch()
                os._exit(9)
        if "refuse" in text:
            refused = parser_pb2.RefusedChat(message="it is refused", param="role", is_too_long="too long" in text)
            return parser_pb2.RenderChatResponse(refused=refused)
        tokenizer = Tokenizer.from_file(f"{model.directory}/tokenizer.json")
        return parser_pb2.RenderChatResponse(token_ids=tokenizer.encode(text, add_special_tokens=False).ids, text=text)

    def prepare(self, request: parser_pb2.PrepareAnswerRequest) -> parser_pb2.PrepareAnswerResponse:
        if "refuse" in request.body:
            raise ParserRefused("it is refused")
        structure = '{"json_object": true}' if '"required"' in request.body else ""
        return parser_pb2.PrepareAnswerResponse(structured_outputs=structure, shows_special_tokens=True)

    def begin(self, begin: parser_pb2.BeginAnswer) -> "FakeAnswer":
        return FakeAnswer(begin)


class FakeAnswer:
    def __init__(self, begin: parser_pb2.BeginAnswer) -> None:
        self._begin = begin
        self._reasons = self._thinks = bool(begin.model.reasoning_parser)
        self._thoughts = 0
        self._call = -1
        self._said = ""
        self._in_name = self._in_call = False
        self._name = ""

    def push(self, text: str, token_ids: Sequence[int], *, is_last: bool) -> parser_pb2.ReadAnswerResponse:
        assert len(token_ids) <= 1, "each token comes by itself"
        self._said += text
        if "§fail" in self._said:
            raise ValueError("no such text")
        if "§hang" in self._said:
            time.sleep(60)
        if "§die" in self._said:
            os._exit(9)
        told = parser_pb2.ReadAnswerResponse()
        self._thoughts += self._thinks * len(token_ids)
        for character in text:
            if self._thinks:
                self._thinks = character != "|"
                told.reasoning += character if self._thinks else ""
            elif character == "[":
                self._in_name, self._call, self._name = True, self._call + 1, ""
            elif self._in_name:
                self._name += character if character != ":" else ""
                if character == ":":
                    self._in_name, self._in_call = False, True
                    call_id = f"functions.{self._name}:{self._call + self._begin.earlier_calls}"
                    told.calls.add(index=self._call, name=self._name, id=call_id)
            elif self._in_call and character != "]":
                told.calls.add(index=self._call, arguments=character)
            elif character == "]":
                self._in_call = False
            else:
                told.content += character
        if is_last:
            told.content += "."
            if self._reasons:
                told.reasoning_tokens = self._thoughts
        return told


if __name__ == "__main__":
    run(FakeParsers)
