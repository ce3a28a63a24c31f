"""Generative scoring: prompts of a query and its items, and scores of the labels' logprobs."""

from collections.abc import AsyncIterator
from math import exp
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from penstock.v1 import request_pb2
from tests.unit.services.frontend.fakes import Delta, tokens
from tests.unit.services.frontend.mesh_of_fakes import MeshOfFakes, mesh_of_fakes

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.live]

PATH = "/generative_scoring"
EOS = 1
LABELS = {80: -1.0, 81: -2.0, EOS: -0.5}


def answers(request: request_pb2.GenerateRequest) -> list[Delta]:
    """The end of sequence at once, with the logprobs that were asked for: lower for longer prompts."""
    (delta,) = tokens([EOS])
    named = {label: LABELS[label] - len(request.prompt_token_ids) / 100 for label in request.sampling.logprob_token_ids}
    chosen = request_pb2.TokenLogprob(token_id=EOS, logprob=-0.5, rank=1)
    top = [request_pb2.TokenLogprob(token_id=label, logprob=logprob) for label, logprob in named.items()]
    delta.logprobs.append(request_pb2.PositionLogprobs(chosen=chosen, top=[chosen, *top]))
    return [delta]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(model_path: Path) -> AsyncIterator[MeshOfFakes]:
    async with mesh_of_fakes(model_path, answers, max_choices=3) as mesh:
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(mesh: MeshOfFakes) -> AsyncIterator[httpx.AsyncClient]:
    async with mesh.http() as client:
        yield client


def body(**fields: Any) -> dict[str, Any]:
    return {
        "model": "demo",
        "query": "the fox",
        "items": [" jumps", " is brown"],
        "label_token_ids": [80, 81],
        **fields,
    }


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("are_ids", [False, True])
async def test_each_item_is_a_prompt_with_the_query(
    mesh: MeshOfFakes, http: httpx.AsyncClient, is_first: bool, are_ids: bool
) -> None:
    query, items = mesh.ids("the fox"), [mesh.ids(" jumps"), mesh.ids(" is brown")]
    marked = mesh.text.with_added_tokens(query)
    given = {"query": query, "items": items} if are_ids else {}
    answer = await http.post(PATH, json=body(item_first=is_first, cache_salt="salt", **given))
    assert answer.status_code == 200, answer.text
    front = query if are_ids else marked
    prompts = [list(request.prompt_token_ids) for request in mesh.worker.received[-2:]]
    assert sorted(prompts) == sorted([*each, *front] if is_first else [*front, *each] for each in items)
    assert all(request.sampling.max_tokens == 1 for request in mesh.worker.received[-2:])
    usage = answer.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (sum(map(len, prompts)), 2)
    bare = await http.post(PATH, json=body(add_special_tokens=False, **given))
    assert bare.json()["usage"]["prompt_tokens"] == 2 * len(query) + sum(map(len, items))


@pytest.mark.parametrize("labels", [[80, 81], [81, 80], [EOS, 80], [80, 80, 81], [80]])
async def test_the_first_label_is_scored(mesh: MeshOfFakes, http: httpx.AsyncClient, labels: list[int]) -> None:
    among, of_all = [
        (await http.post(PATH, json=body(label_token_ids=labels, apply_softmax=value))).json()
        for value in (True, False)
    ]
    share = exp(LABELS[labels[0]]) / sum(exp(LABELS[label]) for label in set(labels))
    prompts = [len(mesh.text.with_added_tokens(mesh.ids("the fox"))) + len(mesh.ids(item)) for item in body()["items"]]
    likely = [exp(LABELS[labels[0]] - tokens / 100) for tokens in prompts]
    assert [each["index"] for each in among["data"]] == [0, 1]
    assert [each["score"] for each in among["data"]] == pytest.approx([share, share])
    assert [each["score"] for each in of_all["data"]] == pytest.approx(likely, rel=1e-5)
    assert (among["object"], among["model"], among["data"][0]["object"]) == ("list", "demo", "score")
    assert among["id"].startswith("generative-scoring-")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"items": []}, "items"),
        ({"items": ["a", [5]]}, "items"),
        ({"items": ["a"] * 4}, "items"),
        ({"items": [[10**6]]}, "items"),
        ({"query": [], "items": [[]]}, "items"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [-1]}, "label_token_ids[0]"),
        ({"label_token_ids": [10**6]}, "label_token_ids"),
        ({"label_token_ids": [5] * 129}, "label_token_ids"),
        ({"query": None}, "query"),
        ({"cache_salt": "a/b"}, "cache_salt"),
        ({"model": "nobody"}, "model"),
    ],
)
async def test_what_is_wrong_is_named_as_the_client_wrote_it(
    http: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    answer = await http.post(PATH, json=body(**fields))
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    assert answer.json()["error"]["param"] == param, answer.text


async def test_a_prompt_without_room_for_a_label_loses_its_end(mesh: MeshOfFakes, http: httpx.AsyncClient) -> None:
    model = await mesh.service.catalogue.find("demo")
    assert model is not None
    answer = await http.post(PATH, json=body(items=["word " * 9000, "x" * 90_000], mood="good"))
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == 2 * (model.max_model_len_tokens - 1)
    assert answer.headers["x-penstock-without-effect"] == "mood"
    front = mesh.text.with_added_tokens(mesh.ids("the fox"))
    assert all(list(request.prompt_token_ids[: len(front)]) == front for request in mesh.worker.received[-2:])
