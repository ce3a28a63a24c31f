"""Chats whose prompts a process beside the frontend makes: of models that leave it no other way, and of those with
something that this frontend does not know."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.v1 import request_pb2
from services.frontend.parser_process.launcher import ModuleLauncher
from tests.unit.services.frontend.checkpoints import byte_level, write_checkpoint
from tests.unit.services.frontend.fakes import Delta, tokens
from tests.unit.services.frontend.http.test_tools import NOW, TEMPLATE
from tests.unit.services.frontend.mesh_of_fakes import MeshOfFakes, mesh_of_fakes, without_vllm
from tests.unit.services.frontend.parser_process.test_outside_formats import fake_launcher

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.asyncio]

CHATS = "/v1/chat/completions"
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
REFUSAL: dict[str, Any] = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("outside"), byte_level(), TEMPLATE)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without a chat template."""
    return write_checkpoint(tmp_path_factory.mktemp("bare"), byte_level(), "")


@asynccontextmanager
async def mesh_of(
    path: Path, launcher: ModuleLauncher | None = None, **attributes: str
) -> AsyncIterator[tuple[MeshOfFakes, httpx.AsyncClient]]:
    def script(_: request_pb2.GenerateRequest) -> Iterable[Delta]:
        return tokens(mesh.ids("Yes"))

    async with mesh_of_fakes(path, launcher=launcher or fake_launcher()) as mesh, mesh.http() as http:
        await mesh.add_worker(script, attributes=attributes)
        yield mesh, http


async def prompt_of(http: httpx.AsyncClient, *messages: dict[str, Any], **fields: Any) -> str:
    """What a chat is rendered to."""
    body = {"model": "demo", "messages": list(messages), "return_prompt_text": True, **fields}
    answer = await http.post(CHATS, json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["prompt_text"])


async def refused(http: httpx.AsyncClient, *messages: dict[str, Any], **fields: Any) -> tuple[int, str, Any, Any]:
    answer = await http.post(CHATS, json={"model": "demo", "messages": list(messages), **fields})
    error = answer.json()["error"]
    return answer.status_code, error["message"], error["param"], error["code"]


async def test_a_mode_of_its_own_has_all_chats_rendered_there(checkpoint: Path) -> None:
    async with mesh_of(checkpoint, tokenizer_mode="brackets") as (mesh, http):
        text = await prompt_of(http, USER, reasoning_effort="low", max_tokens=7, temperature=0)
        assert text == "user=Hi max_tokens:7 reasoning_effort:low tool_choice:none"
        received = mesh.worker.received[-1]
        assert list(received.prompt_token_ids) == mesh.ids(text)
        assert received.sampling.max_tokens == 7
        assert mesh.scheduler.placed[-1].vllm_parts == "prompt"
        assert mesh.metric("outside_prompts_total") == 1

        asked = {"model": "demo", "messages": [USER]}
        tokenized = (await http.post("/tokenize", json=asked)).json()
        assert tokenized["tokens"] == mesh.ids("user=Hi tool_choice:none")
        counted = (await http.post("/v1/messages/count_tokens", json=asked)).json()
        assert counted["input_tokens"] == tokenized["count"]
        responded = (await http.post("/v1/responses", json={"model": "demo", "input": "Hi"})).json()
        assert responded["usage"]["input_tokens"] == tokenized["count"]
        completed = await http.post("/v1/completions", json={"model": "demo", "prompt": "Hi"})
        assert completed.json()["usage"]["prompt_tokens"] == len(mesh.text.with_added_tokens(mesh.ids("Hi")))
        assert mesh.scheduler.placed[-1].vllm_parts == ""


async def test_what_it_refuses_is_the_clients_to_mend(checkpoint: Path) -> None:
    async with mesh_of(checkpoint, tokenizer_mode="brackets") as (mesh, http):
        assert await refused(http, {"role": "user", "content": "refuse"}) == (400, "it is refused", "role", None)
        too_long = 400, "it is refused", "messages", "context_length_exceeded"
        assert await refused(http, {"role": "user", "content": "refuse: too long"}) == too_long
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        status, _, param, _ = await refused(http, {"role": "user", "content": [picture]})
        assert (status, param) == (400, "messages[0].content[0].image_url")
        assert not mesh.worker.received


async def test_a_process_that_dies_over_a_chat_is_asked_again(checkpoint: Path) -> None:
    async with mesh_of(checkpoint, tokenizer_mode="brackets") as (mesh, http):
        assert (await prompt_of(http, {"role": "user", "content": "§die"})).startswith("user=§die")
        assert mesh.metric("parser_losses_total") == 1


async def test_a_mode_that_cannot_be_used_is_said_at_once(checkpoint: Path) -> None:
    async with mesh_of(checkpoint, tokenizer_mode="braces") as (_, http):
        status, message, _, code = await refused(http, USER)
        assert (status, code) == (503, "model_not_ready")
        assert "tokenizer_mode braces: there is brackets" in message


async def test_parsers_of_its_own_are_told_how_tools_are_chosen(checkpoint: Path) -> None:
    named = {"tokenizer_mode": "brackets", "tool_call_parser": "brackets"}
    async with mesh_of(checkpoint, **named) as (mesh, http):
        assert "tool_choice:required" in await prompt_of(http, USER, tools=[NOW], tool_choice="required")
        assert mesh.scheduler.placed[-1].vllm_parts == "prompt, answer"
        assert mesh.metric("outside_answers_total") == 1


async def test_harmony_takes_both_parts_unasked(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "oss", byte_level(), TEMPLATE)
    (path / "config.json").write_text('{"model_type": "gpt_oss"}')
    async with mesh_of(path) as (mesh, http):
        body = {"model": "demo", "messages": [USER]}
        message = (await http.post(CHATS, json=body)).json()["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("Yes", "."), "nothing ends its thought"
        assert mesh.scheduler.placed[-1].vllm_parts == "prompt, answer"
        model = mesh.service.catalogue.get("demo")
        assert model is not None
        assert model.reasoning_parser == "openai_gptoss"


async def test_what_this_frontend_does_not_know_goes_there_alone(checkpoint: Path) -> None:
    async with mesh_of(checkpoint) as (mesh, http):
        assert "user=Hi" not in await prompt_of(http, USER)
        assert mesh.service.parser_process.pid is None, "nobody needed it"
        for strange in (
            REFUSAL,
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"role": "function", "name": "f", "content": "1"},
            {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}},
        ):
            told = await prompt_of(http, USER, strange, USER)
            assert told == f"user=Hi {strange['role']}={strange['content']} user=Hi tool_choice:none"
            assert mesh.scheduler.placed[-1].vllm_parts == "prompt"
        assert mesh.metric("outside_prompts_total") == 4


async def test_nothing_is_told_as_without_effect_that_has_one(checkpoint: Path) -> None:
    moody = {"role": "user", "content": [{"type": "text", "text": "Hi", "mood": "good"}]}
    parts = "{% for m in messages %}{% for part in m.content %}{{ part.mood }}{% endfor %}{% endfor %}"
    async with mesh_of(checkpoint) as (_, http):
        for messages, told in (([REFUSAL], ""), ([USER, moody], "messages[1].content[0].mood")):
            answer = await http.post(CHATS, json={"model": "demo", "messages": messages})
            assert answer.status_code == 200
            assert answer.headers.get("x-penstock-without-effect", "") == told
    async with mesh_of(write_checkpoint(checkpoint / "parts", byte_level(), parts)) as (_, http):
        answer = await http.post(CHATS, json={"model": "demo", "messages": [moody], "return_prompt_text": True})
        assert answer.json()["prompt_text"] == "good"
        assert "x-penstock-without-effect" not in answer.headers


async def test_what_vllm_would_fetch_or_unpack_is_not_given_to_it(checkpoint: Path) -> None:
    picture = {"type": "image_url", "image_url": {"url": "http://10.0.0.1/secret"}}
    async with mesh_of(checkpoint) as (mesh, http):
        for part, place in (
            ({"type": "telepathy"}, "messages[1].content[0]"),
            ({"type": "input_image", "image_url": "http://10.0.0.1/secret"}, "messages[1].content[0]"),
            ({"type": "prompt_embeds", "data": "gASV"}, "messages[1].content[0]"),
            (picture, "messages[1].content[0].image_url"),
        ):
            status, _, param, _ = await refused(http, REFUSAL, {"role": "user", "content": [part]})
            assert (status, param) == (400, place)
        assert mesh.service.parser_process.pid is None
    async with mesh_of(checkpoint, tokenizer_mode="brackets") as (mesh, http):
        assert (await refused(http, {"role": "user", "content": [{"type": "telepathy"}]}))[0] == 400
        assert mesh.metric("outside_prompts_total") == 0


async def test_without_vllm_it_is_refused_as_what_it_is(checkpoint: Path, bare: Path) -> None:
    async with mesh_of(checkpoint, without_vllm()) as (_, http):
        status, message, param, code = await refused(http, USER, REFUSAL)
        assert (status, param, code) == (400, "messages[1].content[0]", "unsupported_parameter")
        assert "`refusal`" in message
    async with mesh_of(checkpoint, without_vllm(), tokenizer_mode="brackets") as (_, http):
        status, message, _, _ = await refused(http, USER)
        assert status == 503
        assert "pip install" in message
    async with mesh_of(bare, without_vllm()) as (_, http):
        assert (await refused(http, USER))[1] == "`demo` has no chat template; use /v1/completions."


async def test_a_model_that_vllm_cannot_render_is_as_without_it(tmp_path: Path) -> None:
    for template, message in ((TEMPLATE, "`refusal`"), ("", "has no chat template")):
        path = write_checkpoint(tmp_path / str(len(template)), byte_level(), template)
        (path / "config.json").write_text('{"model_type": "unknown"}')
        async with mesh_of(path) as (mesh, http):
            for _ in range(2):
                status, told, _, _ = await refused(http, REFUSAL if template else USER)
                assert status == 400
                assert message in told
            assert mesh.service.parser_process.state == "running"
        async with mesh_of(path, tokenizer_mode="brackets") as (_, http):
            assert (await refused(http, USER))[0] == 502, "here it is the only way"


async def test_without_a_chat_template_vllm_is_asked_for_one(bare: Path) -> None:
    async with mesh_of(bare) as (mesh, http):
        assert mesh.service.parser_process.pid is None, "it may be for completions alone"
        assert await prompt_of(http, USER) == "user=Hi tool_choice:none"


async def test_reasoning_is_asked_not_to_be_done_as_vllm_would(checkpoint: Path) -> None:
    """`none` makes a prompt of its own here."""
    async with mesh_of(checkpoint, tokenizer_mode="brackets") as (mesh, http):
        body = {"model": "demo", "max_tokens": 5, "messages": [USER], "thinking": {"type": "disabled"}}
        for _ in range(2):
            assert (await http.post("/v1/messages", json=body)).status_code == 200
            prompt = mesh.text.decode(list(mesh.worker.received[-1].prompt_token_ids))
            assert "reasoning_effort:none" in prompt
        assert mesh.metric("outside_prompts_total") == 8, "each effort once, and two messages"
