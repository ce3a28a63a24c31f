"""What a client wants to see of an answer: token ids, logprobs of the prompt, special tokens, counts."""

import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from penstock.v1 import request_pb2
from services.frontend.text.model_text import ModelText
from tests.unit.services.frontend.fakes import Delta, tokens
from tests.unit.services.frontend.mesh_of_fakes import MeshOfFakes, mesh_of_fakes

pytestmark = [pytest.mark.slow, pytest.mark.live]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EOS = 1
USER_TOKEN = 2
"""`<|user|>`, a special token."""


async def post(mesh: MeshOfFakes, path: str, **fields: Any) -> Any:
    asked = {"prompt": "the fox"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
    async with mesh.http() as http:
        response = await http.post(path, json={"model": "demo", **asked, **fields})
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        return response.json()
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def logprobs_of(token_ids: Sequence[int], rivals: int) -> list[request_pb2.PositionLogprobs]:
    return [
        request_pb2.PositionLogprobs(
            chosen=request_pb2.TokenLogprob(token_id=token_id, logprob=-1.0 - index),
            top=[request_pb2.TokenLogprob(token_id=80 + rank, logprob=-0.5) for rank in range(rivals)],
        )
        for index, token_id in enumerate(token_ids)
    ]


def says(text: str, request: request_pb2.GenerateRequest, mesh: MeshOfFakes) -> list[Delta]:
    """Token by token, with all logprobs that were asked for."""
    ids = mesh.ids(text)[: request.sampling.max_tokens]
    deltas = tokens(*([token_id] for token_id in ids), finish=request_pb2.FINISH_REASON_LENGTH)
    if request.sampling.HasField("logprobs"):
        for delta in deltas:
            told = logprobs_of(delta.token_ids, request.sampling.logprobs)
            named = request.sampling.logprob_token_ids
            for position in told if named else ():
                top = (request_pb2.TokenLogprob(token_id=token_id, logprob=-2.0) for token_id in named)
                position.top.extend((position.chosen, *top))
            delta.logprobs.extend(told)
    if request.sampling.HasField("prompt_logprobs"):
        deltas[0].prompt_logprobs.extend(logprobs_of(request.prompt_token_ids[1:], request.sampling.prompt_logprobs))
    return deltas


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_token_ids_of_prompt_and_answer(model_path: Path, path: str, stream: bool) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        ids = [*mesh.ids("one STO two"), EOS]
        await mesh.add_worker(lambda _: tokens(*([token_id] for token_id in ids)))
        options: Any = {"stream": True} if stream else {}
        answer = await post(mesh, path, return_token_ids=True, stop="STOP", n=2, **options)
        prompt = list(mesh.worker.received[0].prompt_token_ids)
    if not stream:
        assert [choice["token_ids"] for choice in answer["choices"]] == [ids, ids]
        assert (answer if path == CHAT else answer["choices"][1])["prompt_token_ids"] == prompt
        return
    choices = [choice for chunk in answer for choice in chunk["choices"]]
    for index in range(2):
        told = [token_id for c in choices if c["index"] == index for token_id in c.get("token_ids") or []]
        assert told == ids
    assert (answer[0] if path == CHAT else answer[0]["choices"][0])["prompt_token_ids"] == prompt


async def test_token_ids_end_where_a_stop_string_does(model_path: Path) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        ids = [token_id for letter in "abcd" for token_id in mesh.ids(letter)]
        await mesh.add_worker(lambda _: tokens(ids, [EOS]))
        answer = await post(mesh, COMPLETIONS, return_token_ids=True, stop="c")
    assert answer["choices"][0]["token_ids"] == ids[:3]
    assert answer["choices"][0]["text"] == "ab"


@pytest.mark.parametrize(
    ("fields", "begin"),
    [({}, "the fox jump"), ({"return_token_ids": True}, " jump"), ({"prompt": "<s><s>"}, "<s><s> jump")],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_echoed_prompt_has_logprobs(
    model_path: Path, stream: bool, fields: dict[str, Any], begin: str
) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        await mesh.add_worker(lambda request: says(" jumps over", request, mesh))
        if "prompt" in fields:
            fields = {"prompt": mesh.ids(fields["prompt"])}
        answer = await post(mesh, COMPLETIONS, echo=True, logprobs=2, n=2, max_tokens=2, stream=stream, **fields)
        prompt = list(mesh.worker.received[0].prompt_token_ids)
        assert mesh.worker.received[0].sampling.prompt_logprobs == 2
    parts = [answer] if not stream else answer
    for index in range(2):
        choices = [choice for part in parts for choice in part["choices"] if choice["index"] == index]
        text = "".join(choice["text"] for choice in choices)
        assert text.startswith(begin)
        told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        logprobs = [value for each in told for value in each["token_logprobs"]]
        assert logprobs == [None, *(-1.0 - i for i in range(len(prompt) - 1)), -1.0, -1.0]
        tops = [top for each in told for top in each["top_logprobs"]]
        assert tops[0] is None
        assert all(len(top) == 3 for top in tops[1:]), "the chosen token and its rivals"
        offsets = [offset for each in told for offset in each["text_offset"]]
        spelled = [token for each in told for token in each["tokens"]]
        assert spelled[0] == "<s>", "a special token is no text, and counts by its name"
        assert offsets == list(accumulate(map(len, spelled), initial=0))[:-1]


@pytest.mark.parametrize("wanted", [False, True])
async def test_a_completion_takes_the_logprobs_of_a_chat(model_path: Path, wanted: bool) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        await mesh.add_worker(lambda request: says(" jumps over", request, mesh))
        answer = await post(mesh, COMPLETIONS, logprobs=wanted, max_tokens=2)
        assert mesh.worker.received[0].sampling.logprobs == int(wanted)
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-1.0, -1.0]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_named_tokens_have_their_logprobs_behind_the_chosen_one(model_path: Path, path: str) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        await mesh.add_worker(lambda request: says(" jumps", request, mesh))
        named = {"logprobs": 0 if path == COMPLETIONS else True, "logprob_token_ids": [80, 81]}
        answer = await post(mesh, path, max_tokens=1, return_tokens_as_token_ids=True, **named)
        sampling = mesh.worker.received[0].sampling
        assert (sampling.logprobs, list(sampling.logprob_token_ids)) == (0, [80, 81])
        chosen = mesh.ids(" jumps")[0]
        async with mesh.http() as http:
            body = {"model": "demo", "prompt": "a", "echo": True, "max_tokens": 0, **named, "logprobs": 1}
            refused = await http.post(COMPLETIONS, json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprob_token_ids")
    told = answer["choices"][0]["logprobs"]
    spelled = [f"token_id:{token_id}" for token_id in (chosen, 80, 81)]
    if path == COMPLETIONS:
        assert list(told["top_logprobs"][0]) == spelled
    else:
        assert [each["token"] for each in told["content"][0]["top_logprobs"]] == spelled


@pytest.mark.parametrize("echo", [False, True])
async def test_no_tokens_compute_the_prompt_only(model_path: Path, echo: bool) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        await mesh.add_worker(lambda request: says(" jumps", request, mesh))
        answer = await post(mesh, COMPLETIONS, echo=echo, logprobs=1, max_tokens=0)
        assert mesh.worker.received[0].sampling.max_tokens == 1, "the least that an engine generates"
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("the fox" if echo else "", "length")
    assert len(choice["logprobs"]["tokens"]) == (answer["usage"]["prompt_tokens"] if echo else 0)
    assert answer["usage"]["completion_tokens"] == 0


async def test_logprobs_of_a_prompt_in_vllm_s_form(model_path: Path) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        await mesh.add_worker(lambda request: says("x", request, mesh))
        answer = await post(mesh, COMPLETIONS, prompt=[70, 71, 80], prompt_logprobs=1)
        chat = await post(mesh, CHAT, prompt_logprobs=0)
    first, second, third = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second["71"] == {"logprob": -1.0, "rank": None, "decoded_token": mesh.text.token_text(71)[0]}
    assert second["80"]["rank"] == 1
    assert list(third) == ["80"]
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


async def test_logprobs_of_a_prompt_that_never_came_are_an_error(model_path: Path) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        await mesh.add_worker(lambda _: tokens(mesh.ids("x"), [EOS]))
        async with mesh.http() as http:
            response = await http.post(COMPLETIONS, json={"model": "demo", "prompt": "a b", "prompt_logprobs": 1})
    assert (response.status_code, response.json()["error"]["code"]) == (502, "worker_lost")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"stop": "two"}, "one "),
        ({"stop": "two", "include_stop_str_in_output": True}, "one two"),
        ({"stop": "two", "min_tokens": 40, "max_tokens": 60}, "one two three"),
        (
            {"stop_token_ids": [EOS], "include_stop_str_in_output": True, "skip_special_tokens": False},
            "one two three</s>",
        ),
        ({"skip_special_tokens": False, "spaces_between_special_tokens": False}, "one two<|user|> three"),
    ],
)
async def test_stops_and_special_tokens(model_path: Path, fields: dict[str, Any], text: str) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        ids = [*mesh.ids("one two"), *([USER_TOKEN] if "spaces" in str(fields) else []), *mesh.ids(" three")]
        await mesh.add_worker(lambda _: tokens(*([token_id] for token_id in [*ids, EOS])))
        for stream in (False, True):
            answer = await post(mesh, COMPLETIONS, stream=stream, **fields)
            parts = answer if stream else [answer]
            assert "".join(part["choices"][0]["text"] for part in parts) == text


async def test_every_chunk_can_say_how_many_tokens_there_are(model_path: Path) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        await mesh.add_worker(lambda request: says("one two three", request, mesh))
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = await post(mesh, CHAT, stream=True, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["choices"]]
    assert counts == list(range(len(counts)))
    assert chunks[-1]["usage"]["completion_tokens"] == counts[-1]
    assert "prompt_tokens_details" in chunks[-1]["usage"]


async def test_tokens_are_spelled_by_their_ids(model_path: Path) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        await mesh.add_worker(lambda request: says("x", request, mesh))
        answer = await post(mesh, COMPLETIONS, logprobs=1, return_tokens_as_token_ids=True)
        assert answer["choices"][0]["logprobs"]["tokens"] == [f"token_id:{mesh.ids('x')[0]}"]
        chat = await post(mesh, CHAT, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
        assert chat["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0]["token"] == "token_id:80"


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({}, [70, 71, 72, 73]),
        ({"truncate_prompt_tokens": 2}, [72, 73]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [70, 71, 72]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 4094}, [72, 73]),
    ],
)
async def test_prompts_are_cut_to_what_is_asked(model_path: Path, fields: dict[str, Any], left: list[int]) -> None:
    async with mesh_of_fakes(model_path, lambda _: tokens([70], [EOS])) as mesh:
        await post(mesh, COMPLETIONS, prompt=[70, 71, 72, 73], **fields)
        assert list(mesh.worker.received[0].prompt_token_ids) == left


async def test_tokens_around_a_prompt_are_left_out_or_added(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, lambda _: tokens([70], [EOS])) as mesh:
        await post(mesh, COMPLETIONS, add_special_tokens=False)
        await post(mesh, CHAT, add_special_tokens=True)
        bare, chat = (list(request.prompt_token_ids) for request in mesh.worker.received)
        assert bare == mesh.ids("the fox")
        assert chat[:2] == [0, 0]


def test_special_tokens_are_spelled_out_by_every_detokenizer(model_path: Path) -> None:
    text = ModelText.load(model_path, lambda: 0.0)
    ids = [*text.encode("a"), USER_TOKEN, *text.encode("b")]
    assert text.detokenizer((), skip_special_tokens=False).push(ids) == "a<|user|>b"
    assert text.detokenizer(()).push(ids) == "ab"


def follows(request: request_pb2.GenerateRequest) -> list[Delta]:
    """The likeliest token behind a prompt is the one after its last, then the end of sequence."""
    last = request.prompt_token_ids[-1]
    top = [(last + 1, -0.5), (EOS, -1.0 if last < 75 else -0.1), (last + 2, -1.5), (last + 3, -3.0)]
    (delta,) = tokens([last + 1], finish=request_pb2.FINISH_REASON_LENGTH)
    rivals = [request_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in top]
    delta.logprobs.append(request_pb2.PositionLogprobs(chosen=rivals[0], top=rivals[: request.sampling.logprobs]))
    return [delta]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_beam_search_answers_with_the_likeliest_texts(model_path: Path, path: str) -> None:
    async with mesh_of_fakes(model_path, follows) as mesh:
        asked: dict[str, Any] = {"use_beam_search": True, "n": 2, "max_tokens": 3, "return_token_ids": True}
        if path == COMPLETIONS:
            asked["prompt"] = [73]
        answer = await post(mesh, path, **asked)
        chunks = await post(mesh, path, **asked, stream=True, stream_options={"include_usage": True})
        first = mesh.worker.received[0]
    assert (first.sampling.max_tokens, first.sampling.logprobs, first.sampling.temperature) == (1, 4, 0.0)
    choices = answer["choices"]
    if path == COMPLETIONS:
        assert [choice["token_ids"] for choice in choices] == [[74, 75, EOS], [74, 75, 76]]
        assert [choice["finish_reason"] for choice in choices] == ["stop", "length"]
        assert [choice["stop_reason"] for choice in choices] == [EOS, None]
        assert answer["usage"]["completion_tokens"] == 5, "the end of sequence is not counted"
    ids = [choice["token_ids"] for chunk in chunks for choice in chunk["choices"] if choice.get("finish_reason")]
    assert ids == [choice["token_ids"] for choice in choices]
    assert chunks[-1]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]


async def test_a_beam_search_tells_logprobs(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, follows) as mesh:
        asked: dict[str, Any] = {"use_beam_search": True, "n": 2, "max_tokens": 3, "prompt": [73]}
        ids = {"return_tokens_as_token_ids": True}
        best, second = (await post(mesh, COMPLETIONS, **asked, **ids, logprobs=1))["choices"]
        chat = await post(mesh, CHAT, **{**asked, "prompt": None}, logprobs=True, top_logprobs=1)
    assert best["logprobs"]["tokens"] == ["token_id:74", "token_id:75"], "not of the token that ended it"
    assert best["logprobs"]["token_logprobs"] == [-0.5, -0.5]
    assert best["logprobs"]["top_logprobs"][0] == {"token_id:74": -0.5, "token_id:1": -1.0}
    assert second["logprobs"]["token_logprobs"] == [-0.5, -0.5, -0.5]
    assert len(chat["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 1


async def test_a_beam_search_answers_several_prompts(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, follows) as mesh:
        asked: dict[str, Any] = {"use_beam_search": True, "n": 2, "max_tokens": 2, "return_token_ids": True}
        both = await post(mesh, COMPLETIONS, **asked, prompt=[[73], [20]])
        each = [await post(mesh, COMPLETIONS, **asked, prompt=prompt) for prompt in ([73], [20])]
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    alone = [choice["token_ids"] for answer in each for choice in answer["choices"]]
    assert [choice["token_ids"] for choice in both["choices"]] == alone
    assert both["usage"]["total_tokens"] == sum(answer["usage"]["total_tokens"] for answer in each)


@pytest.mark.parametrize(("fields", "param"), [({"n": 11}, "n"), ({"max_tokens": 0}, "max_tokens")])
async def test_what_a_beam_search_cannot_do_is_named(model_path: Path, fields: dict[str, Any], param: str) -> None:
    async with mesh_of_fakes(model_path, follows) as mesh, mesh.http() as http:
        body = {"model": "demo", "prompt": "x", "use_beam_search": True, **fields}
        response = await http.post(COMPLETIONS, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"stop": "x"}, "stop"),
        ({"prompt_logprobs": 0, "seed": 0}, "prompt_logprobs, seed"),
        ({"min_tokens": 1, "response_format": {"type": "json_object"}}, "min_tokens, response_format"),
        ({"bad_words": ["x"], "seed": 1}, "seed, bad_words"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
        ({"echo": True, "temperature": 0, "user": "me"}, "user"),
    ],
)
async def test_what_a_beam_search_does_not_keep_is_told(model_path: Path, fields: dict[str, Any], told: str) -> None:
    async with mesh_of_fakes(model_path, follows) as mesh, mesh.http() as http:
        body = {"model": "demo", "prompt": "x", "use_beam_search": True, "max_tokens": 1, **fields}
        response = await http.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    assert set(response.headers["x-penstock-without-effect"].split(", ")) == set(told.split(", "))
    assert response.json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_what_ended_an_answer_is_named(model_path: Path, path: str) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        ids = [*mesh.ids("one two"), 70]
        await mesh.add_worker(lambda _: tokens(*([token_id] for token_id in [*ids, EOS])))
        assert await reasons(mesh, path, stop=["two", "wo"]) == ["two", "two"], "the longer one"
        assert await reasons(mesh, path) == [None, None], "the end of sequence"
    async with mesh_of_fakes(model_path, lambda _: tokens([69], [70])) as mesh:
        assert await reasons(mesh, path, stop_token_ids=[70]) == [70, 70]


async def reasons(mesh: MeshOfFakes, path: str, **fields: Any) -> list[Any]:
    """`stop_reason` of a whole answer and of a stream's last chunk."""
    whole = (await post(mesh, path, **fields))["choices"][0]
    (last,) = [
        choice
        for chunk in await post(mesh, path, stream=True, **fields)
        for choice in chunk["choices"]
        if choice["finish_reason"]
    ]
    assert whole["finish_reason"] == last["finish_reason"] == "stop"
    return [whole["stop_reason"], last["stop_reason"]]


async def test_the_end_of_sequence_has_its_place_among_the_logprobs(model_path: Path) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        ids = [*mesh.ids("x"), EOS]
        deltas = tokens(*([token_id] for token_id in ids))
        for delta in deltas:
            delta.logprobs.extend(logprobs_of(delta.token_ids, 0))
        await mesh.add_worker(lambda _: deltas)
        answer = await post(mesh, CHAT, logprobs=True)
        completion = await post(mesh, COMPLETIONS, logprobs=0)
    assert answer["choices"][0]["message"]["content"] == "x"
    assert [each["token"] for each in answer["choices"][0]["logprobs"]["content"]] == ["x", "</s>"]
    assert completion["choices"][0]["logprobs"]["top_logprobs"] == [{"x": -1.0}, {"</s>": -1.0}]


async def test_the_prompt_s_text_is_told_where_it_is_wanted(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, lambda _: tokens([70], [EOS])) as mesh:
        answer = await post(mesh, CHAT, return_prompt_text=True)
        chunks = await post(mesh, CHAT, return_prompt_text=True, stream=True)
        plain = await post(mesh, CHAT)
    assert answer["prompt_text"] == chunks[0]["prompt_text"] == "<s><|user|>hi<|assistant|>"
    assert plain["prompt_text"] is None


async def test_a_chat_says_how_much_of_its_prompt_is_cached_for_later_ones(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, lambda _: tokens([70], [EOS])) as mesh:
        answer = await post(mesh, CHAT, messages=[{"role": "user", "content": "word " * 40}])
    usage = answer["usage"]
    created, cached = (usage["prompt_tokens_details"][name] for name in ("created_cache_tokens", "cached_tokens"))
    assert created + cached == usage["prompt_tokens"] // 16 * 16, "whole blocks"
