"""What a client says of the prompt: chat template and messages, tokens that must not come, the prefix cache."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from controlplane.model.prefix_hash import block_hashes, root_hash
from penstock.v1 import request_pb2
from services.frontend.requests.api_keys import new_key_line
from tests.unit.services.frontend.fakes import Delta, tokens
from tests.unit.services.frontend.mesh_of_fakes import MeshOfFakes, mesh_of_fakes

pytestmark = pytest.mark.live

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}{% if message.mood is defined %} {{ message.mood }}{% endif %}>"
    "{{ message.content | trim }};{% endfor %}"
    "{% if documents %}{{ documents[0].text }}{% endif %}{% if thinking %}thinks{% endif %}"
    "{% if reasoning_effort %}effort {{ reasoning_effort }}{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}, enable_thinking False{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest_asyncio.fixture
async def mesh(model_path: Path, tmp_path: Path) -> AsyncIterator[MeshOfFakes]:
    for file in model_path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    async with mesh_of_fakes(tmp_path) as mesh:
        await mesh.add_worker(lambda _: tokens(mesh.ids(" all"), [1]))
        yield mesh


async def chat(mesh: MeshOfFakes, **fields: Any) -> httpx.Response:
    async with mesh.http() as http:
        body = {"model": "demo", "messages": [USER], **fields}
        return await http.post(CHAT, json=body, headers={"x-penstock-event-ids": "true"})


def asked(mesh: MeshOfFakes) -> str:
    return mesh.text.decode(mesh.worker.received[-1].prompt_token_ids)


RULE = {"role": "developer", "content": "be brief"}
SYSTEM = {"role": "system", "content": "you add"}
UNFINISHED = [USER, {"role": "assistant", "content": "First of"}]


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "<user>hi;<assistant>"),
        ({"add_generation_prompt": False}, "<user>hi;"),
        ({"reasoning_effort": "low"}, "<user>hi;effort low<assistant>"),
        ({"reasoning_effort": "none"}, "<user>hi;effort none, enable_thinking False<assistant>"),
        ({"chat_template_kwargs": {"thinking": True}}, "<user>hi;thinks<assistant>"),
        ({"chat_template_kwargs": {"add_generation_prompt": False, "messages": []}}, "<user>hi;<assistant>"),
        ({"documents": [{"text": "facts"}]}, "<user>hi;facts<assistant>"),
        ({"messages": [RULE, USER]}, "<system>be brief;<user>hi;<assistant>"),
        ({"messages": [USER, RULE, USER]}, "<system>be brief;<user>hi;<user>hi;<assistant>"),
        ({"messages": [SYSTEM, USER, RULE]}, "<system>you add\n\nbe brief;<user>hi;<assistant>"),
        ({"messages": [{**RULE, "content": ""}, SYSTEM, USER]}, "<system>you add;<user>hi;<assistant>"),
        ({"messages": [SYSTEM, SYSTEM, USER]}, "<system>you add;<system>you add;<user>hi;<assistant>"),
        ({"messages": [{**USER, "mood": "glad", "refusal": None}]}, "<user glad>hi;<assistant>"),
        ({"messages": UNFINISHED, "continue_final_message": True}, "<user>hi;<assistant>First of"),
        (
            {"messages": [USER, {"role": "assistant", "content": "one \n"}], "continue_final_message": True},
            "<user>hi;<assistant>one",
        ),
    ],
)
async def test_the_prompt_is_what_the_parameters_say(mesh: MeshOfFakes, fields: dict[str, Any], prompt: str) -> None:
    response = await chat(mesh, **fields)
    assert response.status_code == 200, response.text
    assert asked(mesh) == prompt


async def test_a_prompt_that_was_made_before_is_taken(mesh: MeshOfFakes) -> None:
    tokens_before = mesh.ids("the fox")
    given = {"kv_transfer_params": {"prompt_token_ids": tokens_before}}
    answer = await chat(mesh, **given)
    assert answer.status_code == 200, answer.text
    assert "x-penstock-without-effect" not in answer.headers
    assert list(mesh.worker.received[-1].prompt_token_ids) == tokens_before
    also = await chat(mesh, kv_transfer_params={"do_remote_decode": True})
    assert also.headers["x-penstock-without-effect"] == "kv_transfer_params"
    assert asked(mesh) == "<user>hi;<assistant>"
    for wrong in ([], [-1], [True], "a", [10**7]):
        refused = await chat(mesh, kv_transfer_params={"prompt_token_ids": wrong})
        assert refused.json()["error"]["param"] == "kv_transfer_params.prompt_token_ids", refused.text
    async with mesh.http() as http:
        batch = await http.post(f"{CHAT}/batch", json={"model": "demo", "messages": [[USER]], **given})
    assert batch.json()["error"]["param"] == "kv_transfer_params.prompt_token_ids", batch.text


@pytest.mark.parametrize(
    ("thinking", "prompt"),
    [
        ({"type": "disabled"}, "<user>hi;effort none, enable_thinking False<assistant>"),
        ({"type": "adaptive", "display": "omitted"}, "<user>hi;<assistant>"),
    ],
)
async def test_a_message_may_ask_the_template_for_no_reasoning(
    mesh: MeshOfFakes, thinking: dict[str, str], prompt: str
) -> None:
    async with mesh.http() as http:
        body = {"model": "demo", "messages": [USER], "thinking": thinking}
        answer = await http.post("/v1/messages", json=body | {"max_tokens": 5})
        counted = await http.post("/v1/messages/count_tokens", json=body)
    assert (answer.status_code, asked(mesh)) == (200, prompt)
    assert counted.json()["input_tokens"] == len(mesh.worker.received[-1].prompt_token_ids)


def _with_prompt_logprobs(mesh: MeshOfFakes, request: request_pb2.GenerateRequest) -> list[Delta]:
    deltas = tokens(mesh.ids(" all"), [1])
    if request.sampling.HasField("prompt_logprobs"):
        chosen = [request_pb2.TokenLogprob(token_id=token_id, rank=2) for token_id in request.prompt_token_ids[1:]]
        deltas[0].prompt_logprobs.extend(request_pb2.PositionLogprobs(chosen=each) for each in chosen)
    return deltas


@pytest.mark.parametrize("stream", [False, True])
async def test_a_continued_message_is_echoed_before_its_continuation(mesh: MeshOfFakes, stream: bool) -> None:
    mesh.worker.script = lambda request: _with_prompt_logprobs(mesh, request)
    create: Any = mesh.client().chat.completions.create
    extra = {"continue_final_message": True, "echo": True}
    answer = await create(model="demo", messages=UNFINISHED, stream=stream, extra_body=extra)
    if stream:
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in answer])
    else:
        text = answer.choices[0].message.content
        first, second, *_ = answer.model_extra["prompt_logprobs"]
        assert first is None, "as vLLM tells them with an echo"
        assert [entry["rank"] for entry in second.values()] == [2]
    assert text == "First of all"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": [USER, {"role": 3}]}, "messages[1].role"),
        (
            {"messages": [USER, {"role": "user", "content": [{"type": "text", "text": 4}]}]},
            "messages[1].content[0].text",
        ),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"bad_words": ["a"] * 129}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"logprob_token_ids": [3]}, "logprob_token_ids"),
        ({"logprobs": True, "logprob_token_ids": [3], "use_beam_search": True}, "logprob_token_ids"),
        ({"logprobs": True, "logprob_token_ids": [10**6]}, "logprob_token_ids"),
        ({"logprobs": True, "logprob_token_ids": [3] * 129}, "logprob_token_ids"),
        ({"vllm_xargs": {"kv_transfer_params": 1}}, "vllm_xargs.kv_transfer_params"),
        ({"vllm_xargs": {"a": 2**64}}, "vllm_xargs[...]"),
    ],
)
async def test_what_is_wrong_is_named(mesh: MeshOfFakes, fields: dict[str, Any], param: str) -> None:
    response = await chat(mesh, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert not mesh.worker.received


async def test_bad_words_are_spelled_by_themselves_and_behind_a_blank(mesh: MeshOfFakes) -> None:
    await chat(mesh, bad_words=["fox", " fox", "lazy dog"], allowed_token_ids=[7, 8], vllm_xargs={"a": [1, "x"]})
    assert mesh.worker.received[-1].sampling.vllm_xargs == '{"a":[1,"x"]}'
    sampling = mesh.worker.received[-1].sampling
    words = [list(word.token_ids) for word in sampling.bad_words]
    assert words[0] == mesh.ids("fox")
    assert all(mesh.text.decode(word).strip() in ("fox", "lazy dog") for word in words)
    assert len({tuple(word) for word in words}) == len(words)
    assert list(sampling.allowed_token_ids) == [7, 8]


async def test_a_cache_salt_has_blocks_of_its_own(mesh: MeshOfFakes) -> None:
    async with mesh.http() as http:
        ids = [70 + index % 9 for index in range(40)]
        body = {"model": "demo", "prompt": ids, "cache_salt": "pepper"}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
    assert mesh.worker.received[-1].cache_salt == "pepper"
    assert list(mesh.scheduler.placed[-1].block_hashes) == block_hashes(ids, 16, root_hash("pepper"))


async def test_tenants_with_caches_of_their_own_share_no_block(model_path: Path, tmp_path: Path) -> None:
    made = {name: new_key_line(name, bytes([len(name)]) * 32) for name in ("alice", "bob")}
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{line}\n" for _, line in made.values()))
    ids = [70 + index % 9 for index in range(40)]
    async with mesh_of_fakes(model_path, api_keys_file=keys, separate_tenant_caches=True) as mesh:
        await mesh.add_worker(lambda _: tokens([70], [1]))
        salts: dict[str, str] = {}
        async with mesh.http() as http:

            async def asks(name: str, **body: str) -> str:
                headers = {"authorization": f"Bearer {made[name][0]}"}
                answer = await http.post(
                    "/v1/completions", json={"model": "demo", "prompt": ids, **body}, headers=headers
                )
                assert answer.status_code == 200
                salt: str = mesh.worker.received[-1].cache_salt
                assert list(mesh.scheduler.placed[-1].block_hashes) == block_hashes(ids, 16, root_hash(salt))
                return salt

            salts = {"alice": await asks("alice"), "bob": await asks("bob")}
            assert await asks("alice") == salts["alice"], "within a tenant all find the same"
            salts["peppered"] = await asks("alice", cache_salt="pepper")
            salts["forged"] = await asks("bob", cache_salt=salts["alice"])
            assert len(set(salts.values())) == 4, "not even a tenant that knows another's salt finds its blocks"


async def test_what_a_request_leaves_out_is_as_the_worker_s_model_has_it(model_path: Path) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        defaults = '{"temperature": 0.6, "top_k": 20, "max_tokens": 30, "unheard_of": 1}'
        await mesh.add_worker(lambda _: tokens([70], [1]), attributes={"sampling_defaults": defaults})
        await chat(mesh)
        await chat(mesh, temperature=0.1, top_k=-1, max_tokens=40)
        async with mesh.http() as http:
            await http.post("/v1/completions", json={"model": "demo", "prompt": "x"})
            (listed,) = (await http.get("/v1/models")).json()["data"]
    by_model, by_client, completion = (request.sampling for request in mesh.worker.received)
    assert (by_model.temperature, by_model.top_k, by_model.top_p, by_model.max_tokens) == (0.6, 20, 1.0, 30)
    assert (by_client.temperature, by_client.top_k, by_client.max_tokens) == (0.1, 0, 40)
    assert (completion.temperature, completion.max_tokens) == (0.6, 16)
    assert listed["penstock"]["sampling_defaults"]["temperature"] == 0.6


async def test_a_stream_with_long_lists_of_tokens_can_be_resumed(mesh: MeshOfFakes) -> None:
    """What the worker has of a request need not be in the frontends' ticket, which is bounded."""
    asked: dict[str, Any] = {
        "stream": True,
        "allowed_token_ids": [index % 400 for index in range(16_000)],
        "documents": [{"text": "facts", "more": "x" * 70_000}],
        "logit_bias": {str(index): 1 for index in range(400)},
    }
    response = await chat(mesh, **asked)
    assert response.status_code == 200, response.text
    ticket = mesh.worker.received[-1].resume.ticket
    assert 0 < len(ticket) < 1000, ticket
    assert "id: h1" in response.text


async def test_a_template_that_knows_developers_gets_them(model_path: Path, tmp_path: Path) -> None:
    for file in model_path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    knowing = TEMPLATE + "{% if messages[0].role == 'developer' %}{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(knowing)
    async with mesh_of_fakes(tmp_path) as mesh:
        await mesh.add_worker(lambda _: tokens(mesh.ids(" all"), [1]))
        assert (await chat(mesh, messages=[SYSTEM, USER, RULE])).status_code == 200
        assert asked(mesh) == "<system>you add;<user>hi;<developer>be brief;<assistant>"
