"""Whose id a request has."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.runtime import SystemEntropy
from services.frontend.errors import ApiError
from services.frontend.http.request_ids import new_request_id
from tests.unit.services.frontend.fakes import tokens
from tests.unit.services.frontend.mesh_of_fakes import mesh_of_fakes

pytestmark = pytest.mark.live

BODY = {"model": "demo", "prompt": "x"}


async def test_a_client_s_id_comes_back_and_is_a_part_of_the_mesh_s(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, lambda _: tokens([70], [1])) as mesh, mesh.http() as http:
        answers = [
            await http.post("/v1/completions", json=body, headers={"x-request-id": "order-66"})
            for body in (BODY, BODY, {**BODY, "stream": True}, {**BODY, "n": 0})
        ]
        by_body = await http.post("/v1/completions", json={**BODY, "request_id": "order-67"})
        wrong = await http.post("/v1/completions", json={**BODY, "request_id": "a b"})
        plain = await http.post("/v1/completions", json=BODY)
        received = [request.request_id for request in mesh.worker.received]
    assert {answer.headers["x-request-id"] for answer in answers} == {"order-66"}
    inner = [answer.headers["x-penstock-request-id"] for answer in answers]
    assert len(set(inner)) == 4, "one id for several requests does not mix them up"
    assert all(each.startswith("cmpl-order-66-") for each in inner)
    assert [answers[0].json()["id"], answers[1].json()["id"]] == received[:2] == inner[:2]
    assert json.loads(answers[2].text.split("data: ")[1].splitlines()[0])["id"] == inner[2]
    assert by_body.headers["x-request-id"] == "order-67"
    assert by_body.json()["id"].startswith("cmpl-order-67-")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "request_id")
    assert wrong.headers["x-request-id"].startswith("cmpl-")
    assert plain.headers["x-request-id"] == plain.headers["x-penstock-request-id"] == plain.json()["id"]


@pytest.mark.parametrize("wrong", ["", "a b", "a/b", "-x", "a" * 129, "a\tb", "é"])
async def test_an_id_that_needs_quoting_is_refused(model_path: Path, wrong: str) -> None:
    async with mesh_of_fakes(model_path, lambda _: tokens([70], [1])) as mesh, mesh.http() as http:
        headers = {"x-request-id": wrong.encode("latin-1")}
        answer = await http.post("/v1/completions", json=BODY, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-id")
    assert answer.headers["x-request-id"].startswith("cmpl-")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/generative_scoring", {"model": "nobody"}, 400),
        ("/v1/chat/completions/batch", {"model": "demo"}, 400),
        ("/v1/responses", {"model": "demo", "input": [{"role": 3}]}, 400),
        ("/tokenize", {"model": "nobody", "prompt": "x"}, 404),
        ("/v1/nowhere", {}, 404),
    ],
)
async def test_what_is_refused_at_once_has_ids_too(
    model_path: Path, path: str, body: dict[str, object], status: int
) -> None:
    async with mesh_of_fakes(model_path, lambda _: tokens([70], [1])) as mesh, mesh.http() as http:
        for name, told in (("order-66", "order-66"), ("a b", None), (None, None)):
            answer = await http.post(path, json=body, headers={} if name is None else {"x-request-id": name})
            assert answer.status_code == status, answer.text
            ids = [answer.headers["x-request-id"], answer.headers["x-penstock-request-id"]]
            assert ids[0] == (told or ids[1])
            assert ids[1] != name


@given(st.text(max_size=200))
def test_any_header_gives_a_safe_id_or_a_refusal(given_id: str) -> None:
    try:
        made = new_request_id("cmpl", given_id, SystemEntropy())
    except ApiError:
        return
    assert made.isascii()
    assert made.isprintable()
    assert "/" not in made
    assert len(made) <= 5 + 128 + 9
