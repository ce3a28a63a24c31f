"""Decisions: a prompt for each question, and answers made of the logprobs of its labels."""

from collections.abc import AsyncIterator
from math import log
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from penstock.v1 import request_pb2
from tests.unit.services.frontend.fakes import Delta, tokens
from tests.unit.services.frontend.mesh_of_fakes import MeshOfFakes, mesh_of_fakes
from tests.vllm.deciding_model import write_text_files

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.live]

PATH = "/v1/systemone"
EOS = 2
LIKELY: dict[str, float] = {"A": 0.1, "B": 0.4, "yes": 0.2, "no": 0.05, "0": 0.1, "1": 0.2, "2": 0.1}
CHOICE: dict[str, Any] = {
    "type": "choice",
    "instructions": "Which?",
    "criteria": {"left": None, "right": "to the east"},
}
QUESTIONS: dict[str, Any] = {
    "way": CHOICE,
    "fits": {"type": "noul", "criteria": {"true": "it fits"}},
    "level": {"type": "score", "instructions": "How hard?", "criteria": ["easy", "so so", 3]},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MeshOfFakes]:
    path = tmp_path_factory.mktemp("decides")
    write_text_files(path)

    def answers(request: request_pb2.GenerateRequest) -> list[Delta]:
        """Where a choice was asked for `B`; else the end of sequence, which is no label."""
        labels = {mesh.ids(label)[0]: log(share) for label, share in LIKELY.items()}
        is_choice = "Which?" in mesh.text.decode(list(request.prompt_token_ids))
        first, share = (mesh.ids("B")[0], LIKELY["B"]) if is_choice else (EOS, 0.3)
        (delta,) = tokens([first])
        chosen = request_pb2.TokenLogprob(token_id=first, logprob=log(share), rank=1)
        named = request.sampling.logprob_token_ids
        top = [request_pb2.TokenLogprob(token_id=token, logprob=labels.get(token, -9.0)) for token in named]
        delta.logprobs.append(request_pb2.PositionLogprobs(chosen=chosen, top=[chosen, *top]))
        return [delta]

    async with mesh_of_fakes(path, answers) as mesh:
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(mesh: MeshOfFakes) -> AsyncIterator[httpx.AsyncClient]:
    async with mesh.http() as client:
        yield client


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "state": "The road forks.", "questions": QUESTIONS, **fields}


async def test_each_question_is_answered_by_what_its_labels_are_likely(
    mesh: MeshOfFakes, http: httpx.AsyncClient
) -> None:
    answer = await http.post(PATH, json=body(instructions="Be brief.", cache_salt="salt", mood="good"))
    assert answer.status_code == 200, answer.text
    said = answer.json()
    assert (said["object"], said["model"]) == ("structured_decision", "demo")
    assert said["id"].startswith("decision-")
    assert answer.headers["x-penstock-without-effect"] == "mood"
    way, fits, level = said["answers"]["way"], said["answers"]["fits"], said["answers"]["level"]
    assert list(said["answers"]) == list(QUESTIONS)
    assert (way["type"], way["choice"]) == ("choice", "right")
    assert way["probabilities"] == pytest.approx({"left": 0.2, "right": 0.8})
    assert (fits["type"], fits["noul"]) == ("noul", pytest.approx(0.8))
    assert fits["probabilities"] == pytest.approx({"yes": 0.8, "no": 0.2})
    assert (level["type"], level["score"]) == ("score", pytest.approx(0.25 * 0 + 0.5 * 1 + 0.25 * 2))
    assert level["legend"] == {"0": "easy", "1": "so so", "2": "3"}
    assert [each["confidence"] for each in (way, fits, level)] == pytest.approx([0.4, 0.2, 0.2])
    about = said["diagnostics"]
    assert [about[name]["label_mass"] for name in QUESTIONS] == pytest.approx([0.5, 0.25, 0.4])
    assert [about[name]["argmax_is_label"] for name in QUESTIONS] == [True, False, False]
    received = mesh.worker.received[-3:]
    assert said["usage"] == {
        "input_tokens": sum(len(request.prompt_token_ids) for request in received),
        "output_tokens": 3,
    }
    assert {(request.sampling.max_tokens, request.sampling.temperature) for request in received} == {(1, 0)}
    prompts = {mesh.text.decode(list(request.prompt_token_ids), skip_special_tokens=False) for request in received}
    before, after = "<s><|system|>Be brief.</s><|user|>The road forks.\n\n", "</s><|assistant|>"
    assert prompts == {
        f"{before}Question: Which?\nA: left\nB: right - to the east\nAnswer with the letter of one option only.{after}",
        f"{before}yes: it fits\nno\nAnswer with yes or no only.{after}",
        f"{before}Question: How hard?\n0: easy\n1: so so\n2: 3\nAnswer with the number of one level only.{after}",
    }


async def test_a_state_is_any_json_and_the_model_may_be_left_out(mesh: MeshOfFakes, http: httpx.AsyncClient) -> None:
    answer = await http.post(PATH, json={"state": {"a": [1, "ü"]}, "questions": {"q": {"type": "noul"}}})
    assert answer.status_code == 200, answer.text
    assert '<|user|>{"a": [1, "ü"]}\n\nyes\nno\n' in mesh.text.decode(
        list(mesh.worker.received[-1].prompt_token_ids), skip_special_tokens=False
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"questions": {}}, "questions"),
        ({"questions": {"q": {"type": "noul"}} | {str(n): {"type": "noul"} for n in range(64)}}, "questions"),
        ({"questions": {"": {"type": "noul"}}}, "questions"),
        ({"questions": {"q": {}}}, "questions.q.type"),
        ({"questions": {"q": {"type": ["noul"]}}}, "questions.q.type"),
        ({"questions": {"q": {"type": "noul", "mood": 1}}}, "questions.q.mood"),
        ({"questions": {"q": {"type": "choice"}}}, "questions.q.criteria"),
        (
            {"questions": {"q": {"type": "choice", "criteria": dict.fromkeys(map(str, range(27)))}}},
            "questions.q.criteria",
        ),
        ({"questions": {"q": {"type": "noul", "criteria": {"yes": "it is"}}}}, "questions.q.criteria"),
        ({"questions": {"q": {"type": "score", "criteria": ["a", "a"]}}}, "questions.q.criteria"),
        ({"questions": {"q": {"type": "score", "criteria": ["a"]}}}, "questions.q.criteria"),
        ({"images": ["data:image/png;base64,AAAA"]}, "images"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"state": "word " * 9000}, "state"),
        ({"cache_salt": "a/b"}, "cache_salt"),
        ({"model": "nobody"}, "model"),
    ],
)
async def test_what_is_wrong_is_named_as_the_client_wrote_it(
    mesh: MeshOfFakes, http: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    asked = len(mesh.worker.received)
    answer = await http.post(PATH, json=body(**fields))
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    assert answer.json()["error"]["param"] == param, answer.text
    assert len(mesh.worker.received) == asked


async def test_a_label_of_several_tokens_is_refused(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, lambda _: tokens([70])) as mesh, mesh.http() as http:
        answer = await http.post(PATH, json=body())
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "questions.fits.type"), answer.text
        assert not mesh.worker.received
