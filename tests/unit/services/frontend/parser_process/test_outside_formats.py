"""Formats that a process beside the frontend reads, as the official client sees them, and what its death does."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import openai
import pytest

from penstock.v1 import request_pb2
from services.frontend.parser_process import answer as answers
from services.frontend.parser_process.launcher import ModuleLauncher
from tests.resuming_client import ResumingClient
from tests.unit.services.frontend.checkpoints import byte_level, write_checkpoint
from tests.unit.services.frontend.fakes import Delta, tokens
from tests.unit.services.frontend.http.test_resume import CHAT, pair, truth
from tests.unit.services.frontend.http.test_tools import NOW, TEMPLATE, WEATHER, streamed, whole
from tests.unit.services.frontend.mesh_of_fakes import MeshOfFakes, mesh_of_fakes

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.asyncio]

SAID = "A thought, über Wetter.|Let me look. [weather:{'city': 'Bergen'}][now:{}] Done"
CALLS = [("functions.weather:0", "weather", "{'city': 'Bergen'}"), ("functions.now:1", "now", "{}")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("outside"), byte_level(), TEMPLATE)


def fake_launcher() -> ModuleLauncher:
    return ModuleLauncher("tests.unit.services.frontend.parser_process.fake_parsers", needs="grpc")


@asynccontextmanager
async def saying(checkpoint: Path, text: str, *, step_s: float = 0.0, **attributes: str) -> AsyncIterator[MeshOfFakes]:
    """A mesh whose model says `text`, two tokens a step."""

    def script(_: request_pb2.GenerateRequest) -> Iterable[Delta]:
        ids = mesh.ids(text)
        return tokens(*(ids[at : at + 2] for at in range(0, len(ids), 2)))

    named = {"tool_call_parser": "brackets", "reasoning_parser": "bar", **attributes}
    async with mesh_of_fakes(checkpoint, launcher=fake_launcher()) as mesh:
        await mesh.add_worker(script, step_s=step_s, attributes=named)
        yield mesh


def is_another(mesh: MeshOfFakes, pid: int) -> bool:
    return mesh.service.parser_process.pid not in (None, pid)


def says(ids: list[int], _: request_pb2.GenerateRequest) -> Iterable[Delta]:
    return tokens(ids)


async def test_answers_are_read_by_the_process(checkpoint: Path) -> None:
    async with saying(checkpoint, SAID) as mesh:
        expected = ("A thought, über Wetter.", "Let me look.  Done.", CALLS, "tool_calls")
        assert await streamed(mesh, tools=[WEATHER, NOW]) == expected
        choice = await whole(mesh, tools=[WEATHER, NOW])
        assert (choice.message.reasoning, choice.message.content, choice.finish_reason) == (*expected[:2], "tool_calls")
        assert [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls] == CALLS
        _, _, calls, _ = await streamed(mesh, tools=[WEATHER, NOW], parallel_tool_calls=False)
        assert calls == CALLS[:1]
        await streamed(mesh, tools=[NOW], tool_choice="required")
        assert mesh.worker.received[-1].sampling.structured_outputs == '{"json_object": true}'
        async with mesh.http() as http:
            path, body = (
                "/v1/chat/completions",
                {"model": "demo", "messages": [{"role": "user", "content": "x"}], "n": 2},
            )
            counted = len(mesh.ids("A thought, über Wetter.|"))
            told = (await http.post(path, json=body)).json()["usage"]["completion_tokens_details"]
            assert told == {"reasoning_tokens": 2 * counted}
            options = {"stream": True, "stream_options": {"include_usage": True}}
            text = (await http.post(path, json=body | options)).text
            assert f'"completion_tokens_details":{{"reasoning_tokens":{2 * counted}}}' in text
        earlier = {"id": "a", "type": "function", "function": {"name": "now", "arguments": '{"city": ""}'}}
        history = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [earlier]}]
        _, _, calls, _ = await streamed(mesh, messages=history, tools=[NOW])
        assert [call_id for call_id, _, _ in calls] == ["functions.weather:1", "functions.now:2"]
        with pytest.raises(openai.BadRequestError, match="it is refused"):
            await whole(mesh, tools=[NOW], stop="refuse")
        assert mesh.service.parser_process.state == "running"


async def test_a_process_that_dies_loses_nothing(checkpoint: Path) -> None:
    """Killed again and again amid a stream."""
    text = SAID + " and so on, until it is enough" * 5
    async with saying(checkpoint, text, step_s=0.02) as mesh:
        whole_answer = await streamed(mesh, tools=[WEATHER, NOW])
        killed = 0

        async def kill_twice() -> None:
            nonlocal killed
            for _ in range(2):
                await asyncio.sleep(0.4)
                pid = mesh.service.parser_process.pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                killed += 1
                await mesh.until(partial(is_another, mesh, pid), 20)

        told, _ = await asyncio.gather(streamed(mesh, tools=[WEATHER, NOW]), kill_twice())
        assert told == whole_answer
        assert killed == 2 == mesh.metric("parser_losses_total")
        assert mesh.metric("parser_replays_total") >= 1


async def test_an_answer_that_breaks_the_process_fails_alone(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "ANSWER_DEADLINE_S", 1.0)
    async with saying(checkpoint, "x|word " * 40, step_s=0.05) as mesh:
        good = asyncio.ensure_future(streamed(mesh, tools=[NOW]))
        await mesh.until(lambda: bool(mesh.worker.received), 20)
        for breaks in ("§die", "§hang"):
            worker = mesh.worker
            before, ids = worker.script, mesh.ids(f"x|ok {breaks} ")
            worker.script = partial(says, ids)
            with pytest.raises(openai.APIError, match="lost 3 times over this answer"):
                await streamed(mesh, tools=[NOW])
            worker.script = before
        reasoning, content, _, finish = await good
        assert (reasoning, content, finish) == ("x", "word " + "x|word " * 39 + ".", "stop")


async def test_an_answer_that_the_parser_fails_on(checkpoint: Path) -> None:
    async with saying(checkpoint, "x|ok §fail") as mesh:
        with pytest.raises(openai.InternalServerError, match="could not read this answer: ValueError: no such text"):
            await whole(mesh, tools=[NOW])
        assert mesh.metric("parser_losses_total") == 0


async def test_a_stream_that_is_resumed_elsewhere_is_read_on_there() -> None:
    """By the other frontend's process, from the first token on."""
    body = {**CHAT, "tools": [NOW], "max_tokens": 90}
    attributes = {"tool_call_parser": "brackets"}
    async with pair(attributes=attributes, make_launcher=fake_launcher) as mesh:
        expected = await truth(mesh.first, body, "/v1/chat/completions")
        assert ":" not in expected[0][0].partition("[")[2].partition("]")[0], "the process has read a call"
        for cut in (1, 9, 40):
            client = ResumingClient(body, "/v1/chat/completions", {"x-penstock-resumable": "true"})
            await client.ask(mesh.first, cut)
            if not client.is_done:
                await client.resume(mesh.second)
            assert client.answer == expected, cut


async def test_a_name_that_nobody_knows(checkpoint: Path) -> None:
    async with saying(checkpoint, "x", tool_call_parser="nonsense") as mesh:
        with pytest.raises(openai.InternalServerError, match=r"cannot be served.*nonsense: there is brackets"):
            await whole(mesh)


async def test_without_the_library(checkpoint: Path) -> None:
    launcher = ModuleLauncher("services.parser", needs="no_such_package")
    async with mesh_of_fakes(checkpoint, launcher=launcher) as mesh:
        await mesh.add_worker(lambda _: tokens([1]), attributes={"tool_call_parser": "granite"})
        with pytest.raises(openai.InternalServerError, match="no_such_package is not installed where the frontend"):
            await whole(mesh)
