"""What a client asks for besides answers: tokens of a text, the version, whether it serves; and from a browser."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from mesh.errors import ConfigurationError
from services.frontend.settings import FrontendSettings
from tests.unit.services.frontend.fakes import tokens
from tests.unit.services.frontend.mesh_of_fakes import MeshOfFakes, mesh_of_fakes

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
PAGE = "https://chat.example"

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.live]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(model_path: Path) -> AsyncIterator[MeshOfFakes]:
    async with mesh_of_fakes(model_path, lambda _: tokens([70], [1]), allowed_origins=(PAGE,)) as mesh:
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(mesh: MeshOfFakes) -> AsyncIterator[httpx.AsyncClient]:
    async with mesh.http() as client:
        yield client


async def test_a_text_is_tokenised_as_a_prompt_would_be(mesh: MeshOfFakes, http: httpx.AsyncClient) -> None:
    answer = (await http.post("/tokenize", json={"prompt": "the fox", "return_token_strs": True})).json()
    bare = mesh.ids("the fox")
    assert answer["tokens"] == mesh.text.with_added_tokens(bare) != bare
    assert (answer["count"], answer["max_model_len"]) == (len(bare) + 1, 4096)
    assert answer["token_strs"] == [mesh.text.token_name(token_id) for token_id in answer["tokens"]]
    plain = await http.post("/tokenize", json={"model": "demo", "prompt": "the fox", "add_special_tokens": False})
    assert plain.json() == {"count": len(bare), "max_model_len": 4096, "tokens": bare, "token_strs": None}
    back = await http.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": "<s>the fox"}
    assert (await http.post("/detokenize", json={"tokens": [*bare, 600_000]})).json() == {"prompt": "the fox"}


async def test_a_conversation_is_tokenised_as_a_chat_completion_would_be(
    mesh: MeshOfFakes, http: httpx.AsyncClient
) -> None:
    answer = (await http.post("/tokenize", json={"messages": USER})).json()
    used = (await http.post(CHAT, json={"messages": USER})).json()["usage"]["prompt_tokens"]
    assert answer["count"] == used
    assert answer["tokens"] == mesh.ids("<s><|user|>hi<|assistant|>")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a"}),
        ("/tokenize", {"messages": USER}),
        ("/detokenize", {"tokens": [70]}),
        ("/v1/messages/count_tokens", {"messages": USER}),
    ],
)
async def test_an_unknown_parameter_is_told(http: httpx.AsyncClient, path: str, body: dict[str, object]) -> None:
    plain, told = await http.post(path, json=body), await http.post(path, json={**body, "colour": 1, "größe": 2})
    assert plain.json() == told.json()
    assert "x-penstock-without-effect" not in plain.headers
    assert told.headers["x-penstock-without-effect"] == "colour"


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 3}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"model": "nobody", "prompt": "a"}, 404, "model"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
    ],
)
async def test_what_is_wrong_is_named(
    http: httpx.AsyncClient, path: str, body: dict[str, object], status: int, param: str
) -> None:
    response = await http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


async def test_the_model_may_be_left_out_where_there_is_one(http: httpx.AsyncClient) -> None:
    for path, body in ((CHAT, {"messages": USER}), (COMPLETIONS, {"prompt": "hi"})):
        assert (await http.post(path, json=body)).json()["model"] == "demo"


async def test_the_model_must_be_named_where_there_are_several(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, lambda _: tokens([70], [1])) as mesh, mesh.http() as http:
        await mesh.add_worker(lambda _: tokens([70], [1]), instance_id="other-0", model="other")
        await mesh.until(lambda: len(mesh.service.catalogue.served()) == 2)
        error = (await http.post(COMPLETIONS, json={"prompt": "hi"})).json()["error"]
        assert (error["param"], error["code"]) == ("model", "missing_required_parameter")
        assert "demo, other" in error["message"]


async def test_probes_and_version(http: httpx.AsyncClient) -> None:
    for request in (http.get("/ping"), http.post("/ping"), http.get("/health")):
        assert (await request).status_code == 200
    assert (await http.get("/version")).json()["version"]
    assert (await http.get("/load")).json() == {"server_load": 0}


async def test_a_page_of_an_allowed_origin_may_ask(http: httpx.AsyncClient) -> None:
    wanted = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    allowed = await http.options(CHAT, headers=wanted)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == PAGE
    answer = await http.post(COMPLETIONS, json={"prompt": "hi"}, headers={"origin": PAGE})
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    other = await http.post(COMPLETIONS, json={"prompt": "hi"}, headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


async def test_origins_are_given_one_by_one_or_as_vllm_takes_them() -> None:
    settings = FrontendSettings(allowed_origins=(PAGE, '["https://a.example", "https://b.example"]'))
    assert settings.allowed_origins == (PAGE, "https://a.example", "https://b.example")
    with pytest.raises(ConfigurationError, match=r"--allowed-origins .* not a JSON list"):
        FrontendSettings(allowed_origins=('["a',))


async def test_events_have_ids_only_for_clients_that_ask_for_them(http: httpx.AsyncClient) -> None:
    """`vllm bench serve` reads nothing but `data:` lines."""
    body = {"model": "demo", "prompt": "hi", "stream": True}
    plain = (await http.post(COMPLETIONS, json=body)).text
    assert all(line.startswith("data: ") for line in plain.splitlines() if line)
    for header in ("x-penstock-event-ids", "x-penstock-resumable"):
        assert "\nid: " in "\n" + (await http.post(COMPLETIONS, json=body, headers={header: "true"})).text
