"""Answers, as the official client sees them."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.v1 import request_pb2
from tests.unit.services.frontend.fakes import Delta, Script, tokens
from tests.unit.services.frontend.mesh_of_fakes import MeshOfFakes, mesh_of_fakes

pytestmark = pytest.mark.live

EOS = 1
USER: Any = [{"role": "user", "content": "Say something."}]


def saying(
    text: str, *, finish: request_pb2.FinishReason = request_pb2.FINISH_REASON_STOP, cached: int = 0
) -> Callable[[MeshOfFakes], Script]:
    """A worker that says `text` token by token."""

    def script_of(mesh: MeshOfFakes) -> Script:
        ids = mesh.ids(text) + ([EOS] if finish == request_pb2.FINISH_REASON_STOP else [])
        return lambda _: tokens(*([token_id] for token_id in ids), finish=finish, cached=cached)

    return script_of


async def test_a_chat_answer_has_text_usage_and_headers(model_path: Path) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        await mesh.add_worker(saying("Hello, 🙂 wörld", cached=3)(mesh))
        response = await mesh.client().chat.completions.with_raw_response.create(model="demo", messages=USER)
        answer = response.parse()
        assert answer.choices[0].message.content == "Hello, 🙂 wörld"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        prompt = mesh.ids("<s><|user|>Say something.<|assistant|>")
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.completion_tokens == len(mesh.ids("Hello, 🙂 wörld")) + 1
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 3
        assert response.headers["x-request-id"] == answer.id
        assert response.headers["x-penstock-instance"] == "worker-0"
        (received,) = mesh.worker.received
        assert received.request_id == answer.id
        assert list(received.prompt_token_ids) == prompt
        assert received.sampling.max_tokens == 4096 - len(prompt), "by default the rest of the context"
        assert not received.sampling.HasField("seed")
        assert not received.sampling.HasField("logprobs")


@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_streamed_chat_answer_is_the_same_text(model_path: Path, include_usage: bool) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        await mesh.add_worker(saying("Hello, 🙂 wörld")(mesh))
        options: Any = {"stream_options": {"include_usage": True}} if include_usage else {}
        stream = await mesh.client().chat.completions.create(model="demo", messages=USER, stream=True, **options)
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    with_choice = [chunk for chunk in chunks if chunk.choices]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in with_choice) == "Hello, 🙂 wörld"
    assert [chunk.choices[0].finish_reason for chunk in with_choice if chunk.choices[0].finish_reason] == ["stop"]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert len(usages) == include_usage
    if include_usage:
        assert usages[0].total_tokens == usages[0].prompt_tokens + usages[0].completion_tokens


async def test_the_synchronous_client_works_too(model_path: Path) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        await mesh.add_worker(saying("fine")(mesh))

        def ask() -> str | None:
            with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none") as client:
                assert [model.id for model in client.models.list()] == ["demo"]
                return client.chat.completions.create(model="demo", messages=USER).choices[0].message.content

        assert await asyncio.to_thread(ask) == "fine"


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "expected"), [("wor", "Hello "), (["x", "o w"], "Hell"), ("never", "Hello world"), (["H"], "")]
)
async def test_stop_strings_end_the_answer_and_the_engine(
    model_path: Path, stream: bool, stop: str | list[str], expected: str
) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        rest = " and so on" * 200 if expected != "Hello world" else ""
        await mesh.add_worker(saying("Hello world" + rest)(mesh), step_s=0.001)
        text, finish = await chat_text(mesh, stream, stop=stop)
        assert (text, finish) == (expected, "stop")
        if rest:
            await mesh.worker.wait_until(lambda: mesh.worker.aborted == [mesh.worker.received[0].request_id])


async def chat_text(mesh: MeshOfFakes, stream: bool, **options: Any) -> tuple[str, str | None]:
    create: Any = mesh.client().chat.completions.create
    if not stream:
        choice = (await create(model="demo", messages=USER, **options)).choices[0]
        return choice.message.content, choice.finish_reason
    text, finish = "", None
    async for chunk in await create(model="demo", messages=USER, stream=True, **options):
        text += chunk.choices[0].delta.content or ""
        finish = chunk.choices[0].finish_reason or finish
    return text, finish


async def test_sampling_parameters_reach_the_engine(model_path: Path) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        await mesh.add_worker(saying("x", finish=request_pb2.FINISH_REASON_LENGTH)(mesh))
        answer = await mesh.client().chat.completions.create(
            model="demo",
            messages=USER,
            temperature=0.5,
            top_p=0.9,
            seed=-7,
            presence_penalty=0.25,
            frequency_penalty=-0.5,
            logit_bias={"5": -100, "6": 7},
            max_completion_tokens=11,
            max_tokens=12,
            user="me",
            metadata={"a": "b"},
            extra_body={
                "top_k": 40,
                "min_p": 0.05,
                "repetition_penalty": 1.25,
                "min_tokens": 2,
                "ignore_eos": True,
                "stop_token_ids": [9],
                "priority": -3,
            },
        )
        assert answer.choices[0].finish_reason == "length"
        (received,) = mesh.worker.received
    sampling = received.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.05)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.25, -0.5, 1.25)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed, sampling.ignore_eos) == (11, 2, -7, True)
    assert (dict(sampling.logit_bias), list(sampling.stop_token_ids)) == ({5: -100.0, 6: 7.0}, [9])
    assert (received.priority, received.model) == (-3, "demo")
    assert 0 < received.deadline_ms <= 600_000


async def test_several_choices_are_placed_once_and_seeded_apart(model_path: Path) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        answers = ["first", "second one", "3"]

        def script(request: request_pb2.GenerateRequest) -> list[Delta]:
            ids = mesh.ids(answers[request.sampling.seed - 100])
            return tokens(*([token_id] for token_id in ids), [EOS], cached=request.sampling.seed)

        await mesh.add_worker(script)
        answer = await mesh.client().chat.completions.create(model="demo", messages=USER, n=3, seed=100)
        assert [choice.message.content for choice in answer.choices] == answers
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == sum(len(mesh.ids(text)) + 1 for text in answers)
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 100
        assert [place.request_id for place in mesh.scheduler.placed] == [answer.id]
        assert len({request.request_id for request in mesh.worker.received}) == 3
        await mesh.until(lambda: len(mesh.scheduler.ended) == 1)
        assert mesh.scheduler.ended[0].ok


async def test_streamed_choices_are_told_apart(model_path: Path) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        answers = ["one two three", "4"]
        await mesh.add_worker(
            lambda request: tokens(*([i] for i in mesh.ids(answers[request.request_id.endswith("-1")])), [EOS])
        )
        stream = await mesh.client().chat.completions.create(model="demo", messages=USER, n=2, stream=True)
        texts = ["", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert texts == answers


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs(model_path: Path, stream: bool) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        ids = mesh.ids("Hi 🙂")
        await mesh.add_worker(lambda request: with_logprobs(ids, request.sampling.logprobs))
        options: Any = {"logprobs": True, "top_logprobs": 2}
        if stream:
            entries: list[Any] = []
            async for chunk in await mesh.client().chat.completions.create(
                model="demo", messages=USER, stream=True, **options
            ):
                entries += chunk.choices[0].logprobs.content or [] if chunk.choices[0].logprobs else []
        else:
            answer = await mesh.client().chat.completions.create(model="demo", messages=USER, **options)
            assert answer.choices[0].logprobs is not None
            entries = answer.choices[0].logprobs.content or []
        assert b"".join(bytes(entry.bytes or []) for entry in entries) == "Hi 🙂".encode()
        assert [entry.logprob for entry in entries] == [-float(i) for i in range(len(ids))]
        assert [len(entry.top_logprobs) for entry in entries] == [2] * len(ids)


def with_logprobs(ids: Sequence[int], top: int) -> list[Delta]:
    deltas = tokens(*([token_id] for token_id in ids), finish=request_pb2.FINISH_REASON_LENGTH)
    for index, delta in enumerate(deltas):
        chosen = request_pb2.TokenLogprob(token_id=delta.token_ids[0], logprob=-float(index))
        rivals = [request_pb2.TokenLogprob(token_id=70 + rank, logprob=-float("inf")) for rank in range(top)]
        delta.logprobs.append(request_pb2.PositionLogprobs(chosen=chosen, top=rivals))
    return deltas


async def test_logprobs_are_those_of_all_tokens_up_to_the_stop_string(model_path: Path) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        ids = [token_id for letter in "abcSTOPdef" for token_id in mesh.ids(letter)]
        await mesh.add_worker(lambda request: with_logprobs(ids, 0))
        stream = await mesh.client().chat.completions.create(
            model="demo", messages=USER, logprobs=True, stop="STOP", stream=True
        )
        entries: list[Any] = []
        async for chunk in stream:
            entries += chunk.choices[0].logprobs.content or [] if chunk.choices[0].logprobs else []
        assert [entry.token for entry in entries] == list("abcSTOP"), "as many as the usage counts"


async def test_completion_logprobs_have_offsets(model_path: Path) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        ids = [token_id for letter in "xyz" for token_id in mesh.ids(letter)]
        await mesh.add_worker(lambda request: with_logprobs(ids, request.sampling.logprobs))
        answer = await mesh.client().completions.create(model="demo", prompt="p", logprobs=2)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert (logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset) == (
            ["x", "y", "z"],
            [0, -1, -2],
            [0, 1, 2],
        )
        assert logprobs.top_logprobs is not None
        assert len(logprobs.top_logprobs[0]) == 3, "the chosen token and its rivals"


PROMPTS: list[tuple[Any, list[str]]] = [
    ("the fox", ["the fox"]),
    (["the fox", "a dog"], ["the fox", "a dog"]),
    ([70, 71, 72], [[70, 71, 72]]),  # type: ignore[list-item]
    ([[70, 71], [72]], [[70, 71], [72]]),  # type: ignore[list-item]
]


@pytest.mark.slow
@pytest.mark.parametrize(("prompt", "expected"), PROMPTS)
@pytest.mark.parametrize("echo", [False, True])
async def test_prompts_of_every_form(model_path: Path, prompt: Any, expected: list[Any], echo: bool) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        await mesh.add_worker(saying(" goes on")(mesh))
        answer = await mesh.client().completions.create(model="demo", prompt=prompt, echo=echo, n=2)
        texts = [one if isinstance(one, str) else mesh.text.decode(one) for one in expected]
        assert [choice.text for choice in answer.choices] == [
            (text if echo else "") + " goes on" for text in texts for _ in range(2)
        ]
        sent = [list(request.prompt_token_ids) for request in mesh.worker.received]
        ids = [[0, *mesh.ids(one)] if isinstance(one, str) else one for one in expected]
        assert sent == [one for one in ids for _ in range(2)]
        assert mesh.worker.received[0].sampling.max_tokens == 16, "OpenAI's default"
        assert len(mesh.scheduler.placed) == len(expected)


async def test_a_streamed_completion_echoes_first(model_path: Path) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        await mesh.add_worker(saying(" goes on")(mesh))
        stream = await mesh.client().completions.create(model="demo", prompt="it", echo=True, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "it goes on"


async def test_a_stop_token_is_not_shown(model_path: Path) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        (stop_id,) = mesh.ids("!")
        await mesh.add_worker(lambda _: tokens(mesh.ids("yes"), [stop_id]))
        text, finish = await chat_text(mesh, False, extra_body={"stop_token_ids": [stop_id]})
        assert (text, finish) == ("yes", "stop")


async def test_an_engine_that_leaves_out_the_end_token_loses_nothing(model_path: Path) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        await mesh.add_worker(lambda _: tokens(mesh.ids("yes!")))
        assert await chat_text(mesh, False) == ("yes!", "stop")


async def test_content_parts_and_the_developer_role(model_path: Path) -> None:
    async with mesh_of_fakes(model_path) as mesh:
        await mesh.add_worker(saying("ok")(mesh))
        messages: Any = [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ]
        await mesh.client().chat.completions.create(model="demo", messages=messages)
        expected = mesh.ids("<s><|system|>Be brief.<|user|>a\nb<|assistant|>")
        assert list(mesh.worker.received[0].prompt_token_ids) == expected


async def test_the_prompt_is_hashed_in_the_models_blocks(model_path: Path) -> None:
    from controlplane.model.prefix_hash import block_hashes

    async with mesh_of_fakes(model_path) as mesh:
        await mesh.add_worker(saying("ok")(mesh))
        ids = [70 + index % 9 for index in range(100)]
        await mesh.client().completions.create(model="demo", prompt=ids, max_tokens=7, extra_body={"priority": 2})
        (place,) = mesh.scheduler.placed
        assert list(place.block_hashes) == block_hashes(ids, 16)
        assert (place.model, place.prompt_tokens, place.priority, place.max_tokens) == ("demo", 100, 2, 7)
