"""The process with vLLM's parsers against what vLLM's own server does with each of its tokens."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from engine_worker.parser_names import check_parser_names
from mesh.errors import ConfigurationError
from mesh.runtime import SystemClock, system_runtime
from penstock.v1 import parser_pb2, request_pb2
from services.frontend.answers.choice import ChoiceText, TextRules
from services.frontend.metrics import FrontendMetrics
from services.frontend.parser_process.answer import OutsideParsers
from services.frontend.parser_process.launcher import ModuleLauncher
from services.frontend.parser_process.process import ParserProcess
from services.frontend.parsers.deltas import MessageDelta
from services.frontend.text.model_text import ModelText
from services.frontend.workers.token_mailbox import Piece
from tests.vllm.moving import MODEL

pytestmark = pytest.mark.vllm

ACT: dict[str, Any] = {"n": {"type": "integer"}, "text": {"type": "string"}}
TOOL = {"type": "function", "function": {"name": "act", "parameters": {"type": "object", "properties": ACT}}}
CALLS = [("act", {"n": 3, "text": "ä b"}), ("act", {"n": 4})]
FIRST, SECOND = ('{"n": 3, "text": "ä b"}', '{"n": 4}')
LISTED = f'[{{"name": "act", "arguments": {FIRST}}}, {{"name": "act", "arguments": {SECOND}}}]'


def deepseek(arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>act\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def kimi(number: int, arguments: str) -> str:
    return f"<|tool_call_begin|>functions.act:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def glm(**arguments: object) -> str:
    pairs = (f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items())
    return f"<tool_call>act\n{''.join(pairs)}</tool_call>"


@dataclass(frozen=True)
class Format:
    tools: str
    text: str
    special: tuple[str, ...] = ()
    reasoning: str = ""
    model_type: str = "llama"
    are_special: bool = True
    """Its tokens are left out of a text, unless the parser has them shown."""


FORMATS = (
    Format("mistral", f"Let me. [TOOL_CALLS]{LISTED}", ("[TOOL_CALLS]",)),
    Format(
        "deepseek_v3",
        f"Let me. <｜tool▁calls▁begin｜>{deepseek(FIRST)}\n{deepseek(SECOND)}<｜tool▁calls▁end｜>",
        (
            *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
            "<｜tool▁sep｜>",
        ),
        are_special=False,
    ),
    Format(
        "kimi_k2",
        f"Hm.</think>Let me. <|tool_calls_section_begin|>{kimi(0, FIRST)}{kimi(1, SECOND)}<|tool_calls_section_end|>",
        (
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
            *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<think>", "</think>"),
        ),
        "kimi_k2",
        "kimi_k2",
    ),
    Format("granite", f"<|tool_call|>{LISTED}", ("<|tool_call|>",)),
    Format("pythonic", "[act(n=3, text='ä b'), act(n=4)]"),
    Format(
        "glm45",
        f"<think>Hm.</think>Let me. {glm(n=3, text='ä b')}\n{glm(n=4)}",
        ("<tool_call>", "</tool_call>", "<think>", "</think>"),
        "glm45",
        are_special=False,
    ),
    Format("hermes", f'<tool_call>{{"name": "act", "arguments": {FIRST}}}</tool_call>', (), "granite"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("formats")


def checkpoint(folder: Path, form: Format) -> Path:
    """The demo model's tokenizer with the tokens of a format."""
    from transformers import AutoTokenizer

    path = folder / form.tools
    if not path.exists():
        tokenizer = AutoTokenizer.from_pretrained(str(MODEL))
        if form.are_special:
            tokenizer.add_special_tokens({"additional_special_tokens": list(form.special)})
        else:
            tokenizer.add_tokens(list(form.special))
        tokenizer.save_pretrained(str(path))
        config = json.loads((MODEL / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "model_type": form.model_type}))
    return path


@asynccontextmanager
async def parser_process() -> AsyncIterator[ParserProcess]:
    runtime = system_runtime()
    metrics = FrontendMetrics(CollectorRegistry())
    process = ParserProcess(ModuleLauncher(), runtime.transport, runtime.threads, metrics)
    yield process
    await process.stop()


def body(choice: Any) -> str:
    return json.dumps({"model": "m", "tools": [TOOL], "tool_choice": choice})


def theirs(path: Path, form: Format, ids: list[int], ends: bool) -> tuple[list[Any], int]:
    """The delta of each token, as vLLM's server makes it, and how many are reasoning."""
    import vllm.reasoning
    import vllm.tool_parsers  # noqa: F401  registers the names
    from tokenizers.decoders import DecodeStream
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser import ParserManager
    from vllm.tokenizers import get_tokenizer

    tokenizer = get_tokenizer(str(path))
    kind: Any = ParserManager.get_parser(form.tools, form.reasoning or None, True, "m", tokenizer=tokenizer)
    request = ChatCompletionRequest.model_validate({**json.loads(body("auto")), "messages": [], "stream": True})
    request = kind(tokenizer, request.tools).adjust_request(request)
    parser = kind(tokenizer, request.tools)
    decoder = DecodeStream(skip_special_tokens=request.skip_special_tokens)
    deltas = []
    for number, token_id in enumerate(ids, 1):
        text = decoder.step(tokenizer._tokenizer, token_id) or ""
        is_last = number == len(ids)
        text = "" if is_last and ends else text
        deltas.append(parser.parse_delta(text, [token_id], request, [5], finished=is_last))
    return deltas, parser.count_reasoning_tokens(ids)


def told(delta: Any) -> tuple[str, str, list[tuple[int, str | None, str]]]:
    """One delta of vLLM's; what it tells of one call in several pieces is one."""
    if delta is None:
        return "", "", []
    calls: list[tuple[int, str | None, str]] = []
    for call in delta.tool_calls or ():
        name, arguments = (call.function.name, call.function.arguments or "") if call.function else (None, "")
        if calls and calls[-1][0] == call.index and name is None:
            calls[-1] = (call.index, calls[-1][1], calls[-1][2] + arguments)
        elif name is not None or arguments:
            calls.append((call.index, name, arguments))
    return delta.reasoning or "", delta.content or "", calls


def ours(delta: MessageDelta) -> tuple[str, str, list[tuple[int, str | None, str]]]:
    return delta.reasoning, delta.content, [(call.index, call.name, call.arguments) for call in delta.calls]


@pytest.mark.asyncio(loop_scope="module")
async def test_delta_by_delta(folder: Path) -> None:
    """One process for all formats; killed in the middle of each answer, too."""
    async with parser_process() as process:
        for form in FORMATS:
            path = checkpoint(folder, form)
            model = parser_pb2.ParserModel(directory=str(path), tool_parser=form.tools, reasoning_parser=form.reasoning)
            await process.load(model)
            text = ModelText.load(path, SystemClock().unix_s)
            (eos,) = text.eos_token_ids
            for ends in (True, False):
                ids = text.encode(form.text) + ([eos] if ends else [])
                deltas, reasoning_tokens = theirs(path, form, ids, ends)
                answered = await answer(OutsideParsers(process, model), text, ids, ends)
                read = [ours(delta) for delta in answered]
                assert read == [told(delta) for delta in deltas], form.tools
                assert answered[-1].reasoning_tokens == (reasoning_tokens if form.reasoning else None)
                assert all(delta.reasoning_tokens is None for delta in answered[:-1])
                assert any(calls for _, _, calls in read) or form is FORMATS[-1], f"{form.tools}: {read}"
        form = FORMATS[0]
        deltas, _ = theirs(checkpoint(folder, form), form, ids_of(folder, form), False)
        expected = [told(delta) for delta in deltas]
        model = parser_pb2.ParserModel(directory=str(checkpoint(folder, form)), tool_parser=form.tools)
        text = ModelText.load(checkpoint(folder, form), SystemClock().unix_s)
        read = [
            ours(delta)
            for delta in await answer(OutsideParsers(process, model), text, ids_of(folder, form), False, process)
        ]
        assert read == expected, "killed in the middle"
        with pytest.raises(ConfigurationError, match=r"vLLM .* knows .*deepseek_v3.*"):
            await process.load(parser_pb2.ParserModel(directory=str(MODEL), tool_parser="nonsense"))
        with pytest.raises(ConfigurationError, match="could not locate"):
            await process.load(parser_pb2.ParserModel(directory=str(MODEL), tool_parser="deepseek_v3"))
        await requests_are_prepared(process, folder)


def ids_of(folder: Path, form: Format) -> list[int]:
    return ModelText.load(checkpoint(folder, form), SystemClock().unix_s).encode(form.text)


async def answer(
    parsers: OutsideParsers, text: ModelText, ids: list[int], ends: bool, killed: ParserProcess | None = None
) -> list[MessageDelta]:
    """The delta of each token; `killed`: half-way."""
    request, _ = await parsers.prepare(body("auto"), 0)
    detokenizer = text.detokenizer((), skip_special_tokens=not request.shows_special_tokens)
    choice = ChoiceText(0, detokenizer, TextRules(ending_token_ids=text.eos_token_ids, tells_tokens=True))
    reading = parsers.answer(request, [5], "request/0", 60.0, is_whole=False)
    deltas = []
    for number, token_id in enumerate(ids, 1):
        if killed is not None and number == len(ids) // 2:
            killed.kill(await killed.life(), "it is to be")
        finish = request_pb2.FINISH_REASON_STOP if ends else request_pb2.FINISH_REASON_LENGTH
        piece = choice.push(Piece(0, [token_id], (), finish if number == len(ids) else 0, None))
        assert piece is not None
        deltas.append(await reading.read(piece.parts, is_end=piece.finish is not None))
    reading.close()
    return deltas


async def requests_are_prepared(process: ParserProcess, folder: Path) -> None:
    """`required` is a schema or a structural tag, as vLLM has it for the format; `auto` with a strict tool, too."""
    for form, kind in ((FORMATS[4], "json"), (FORMATS[6], "structural_tag")):
        model = parser_pb2.ParserModel(directory=str(checkpoint(folder, form)), tool_parser=form.tools)
        parsers = OutsideParsers(process, model)
        _, structure = await parsers.prepare(body("required"), 0)
        assert list(json.loads(structure)) == [kind]
        assert await parsers.prepare(body("none"), 0) == (
            (await parsers.prepare(body("none"), 0))[0],
            "",
        )


def test_a_worker_refuses_names_that_vllm_does_not_have() -> None:
    check_parser_names("hermes", "qwen3")
    check_parser_names("kimi_k2", "glm45")
    for names, option in ((("nonsense", ""), "--tool-call-parser"), (("hermes", "nonsense"), "--reasoning-parser")):
        with pytest.raises(ConfigurationError, match=f"{option} nonsense.*granite"):
            check_parser_names(*names)
