"""Images over HTTP: in all three APIs, placed by their blocks, recovered with them, and refused for a reason."""

from base64 import b64encode
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import AddedToken

from controlplane.media_message import prompt_media
from controlplane.model.media import ExpandedPrompt, PromptMedia, media_hash
from controlplane.model.media_facts import announced
from controlplane.model.prefix_hash import block_hashes
from engine_worker.engines.simulated_media import SimulatedMedia
from mesh.errors import EngineFailed
from penstock.v1 import request_pb2, scheduler_pb2
from tests.unit.services.frontend.checkpoints import byte_level, write_checkpoint
from tests.unit.services.frontend.fakes import Delta, FakeWorker, failure, tokens
from tests.unit.services.frontend.mesh_of_fakes import MeshOfFakes, mesh_of_fakes

pytestmark = [pytest.mark.slow, pytest.mark.live]

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<{{ part.type }}>{% endif %}{% endfor %}{% endfor %}"
)
CAT, DOG = b"picture of a cat", b"picture of a dog"


def data_url(content: bytes) -> str:
    return f"data:image/png;base64,{b64encode(content).decode()}"


def picture(content: bytes) -> Any:
    return {"type": "image_url", "image_url": {"url": data_url(content)}}


def asking(*contents: bytes) -> Any:
    return [{"role": "user", "content": [{"type": "text", "text": "See: "}, *map(picture, contents)]}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a token for an image."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<image>", normalized=False)])
    return write_checkpoint(tmp_path_factory.mktemp("images"), tokenizer, TEMPLATE)


@asynccontextmanager
async def seeing(
    checkpoint: Path, workers: int = 1, **settings: Any
) -> AsyncIterator[tuple[MeshOfFakes, SimulatedMedia]]:
    """A mesh whose model takes two images."""

    def script(_: request_pb2.GenerateRequest) -> Iterable[Delta]:
        return tokens(mesh.ids("A cat."))

    async with mesh_of_fakes(checkpoint, **settings) as mesh:
        token = mesh.text.token_id("<image>")
        assert token is not None
        media = SimulatedMedia({"image": token}, most=2)
        for number in range(workers):
            attributes = {"media": announced(media.facts)}
            worker = await mesh.add_worker(script, instance_id=f"worker-{number}", attributes=attributes)
            worker.expand = media.expand
        yield mesh, media


async def test_an_image_becomes_tokens_before_it_is_placed(checkpoint: Path) -> None:
    async with seeing(checkpoint) as (mesh, media), mesh.client() as client:
        answer = await client.chat.completions.create(model="demo", messages=asking(CAT))
        assert answer.choices[0].message.content == "A cat."
        (request,) = mesh.worker.received
        told = prompt_media(request.media)
        assert [(item.modality, item.content, item.media_hash) for item in told.items] == [
            ("image", CAT, media_hash("image", CAT))
        ]
        assert told.template_token_ids == tuple(mesh.ids("<|user|>See: <image>"))
        expanded = media.expand(told)
        assert tuple(request.prompt_token_ids) == expanded.token_ids
        assert told.spans == expanded.spans
        assert len(expanded.token_ids) > len(told.template_token_ids) + 4
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(expanded.token_ids)
        (placed,) = mesh.scheduler.placed
        assert placed.prompt_tokens == len(expanded.token_ids)
        assert list(placed.block_hashes) == block_hashes(expanded.token_ids, 16, spans=expanded.spans)
        assert list(placed.block_hashes) != block_hashes(expanded.token_ids, 16)
        assert mesh.service.media.held_bytes == 0


async def test_two_images_of_one_size_share_no_block(checkpoint: Path) -> None:
    async with seeing(checkpoint) as (mesh, _), mesh.client() as client:
        for content in (CAT, DOG, CAT):
            await client.chat.completions.create(model="demo", messages=asking(content))
        cat, dog, again = (list(request.block_hashes) for request in mesh.scheduler.placed)
        assert cat == again
        assert set(cat).isdisjoint(dog)
        first, second, _ = mesh.worker.received
        assert first.prompt_token_ids == second.prompt_token_ids


async def test_a_request_is_placed_again_with_its_images(checkpoint: Path) -> None:
    async with seeing(checkpoint, workers=2) as (mesh, _), mesh.client() as client:
        mesh.workers[0].script = lambda _: [failure(request_pb2.ERROR_CODE_UNAVAILABLE, "full")]
        mesh.scheduler.choose = lambda request: scheduler_pb2.PlaceResponse(
            outcome=scheduler_pb2.PLACE_OUTCOME_PLACED,
            instance_id="worker-1" if request.excluded_instance_ids else "worker-0",
            policy="test",
        )
        answer = await client.chat.completions.create(model="demo", messages=asking(CAT))
        assert answer.choices[0].message.content == "A cat."
        (first,), (second,) = mesh.workers[0].received, mesh.workers[1].received
        assert (first.media, first.prompt_token_ids) == (second.media, second.prompt_token_ids)


async def test_another_instance_expands_where_one_cannot(checkpoint: Path) -> None:
    async with seeing(checkpoint, workers=2) as (mesh, _), mesh.client() as client:
        asked: list[FakeWorker] = []

        def broken(_: PromptMedia) -> ExpandedPrompt:
            asked.append(mesh.workers[0])
            raise EngineFailed("out of order")

        mesh.workers[0].expand = broken
        for number in range(8):  # each goes to one of the two by its hash
            await client.chat.completions.create(model="demo", messages=asking(bytes([number])))
        assert asked
        assert len(mesh.worker.received) == 8


async def test_instances_of_text_alone_beside_one_that_takes_images(checkpoint: Path) -> None:
    """As where a server is attached."""
    async with seeing(checkpoint) as (mesh, _), mesh.client() as client:
        for number in (1, 2):
            await mesh.add_worker(lambda _: tokens(mesh.ids("What?")), instance_id=f"worker-{number}")
        for number in range(6):
            answer = await client.chat.completions.create(model="demo", messages=asking(bytes([number])))
            assert answer.choices[0].message.content == "A cat."
        assert len(mesh.worker.received) == 6


async def test_what_no_instance_can_read_is_the_client_s_fault(checkpoint: Path) -> None:
    async with seeing(checkpoint) as (mesh, _), mesh.client() as client:
        messages = asking(CAT)
        messages[0]["content"][0]["text"] = "<image> twice"
        answer = await client.chat.completions.create(model="demo", messages=messages)
        assert answer.choices[0].message.content == "A cat."  # it stands where the client wrote it
        with pytest.raises(openai.BadRequestError, match="At most 2") as refused:
            await client.chat.completions.create(model="demo", messages=asking(CAT, DOG, CAT))
        assert refused.value.param == "messages[0].content[3].image_url"
        body = {"truncate_prompt_tokens": 5}
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="demo", messages=asking(CAT), extra_body=body)
        assert refused.value.param == "truncate_prompt_tokens"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_usage_tells_how_many_tokens_are_of_images(checkpoint: Path, stream: bool) -> None:
    async with seeing(checkpoint) as (mesh, _), mesh.http() as http:
        body = {"model": "demo", "messages": asking(CAT, CAT), "stream": stream}
        options = {"stream_options": {"include_usage": True}} if stream else {}
        answer = await http.post("/v1/chat/completions", json={**body, **options})
        plain = await http.post("/v1/chat/completions", json={**body, **options, "messages": asking()})
        spans = mesh.worker.received[0].media.spans
    told = [
        f'"multimodal_tokens":{{"image":{sum(span.length for span in spans)}}}' in each.text for each in (answer, plain)
    ]
    assert told == [True, False]


async def test_a_part_without_a_type_is_of_the_medium_that_it_holds(checkpoint: Path) -> None:
    async with seeing(checkpoint) as (mesh, _), mesh.http() as http:
        messages = asking(CAT)
        del messages[0]["content"][1]["type"]
        answer = await http.post("/v1/chat/completions", json={"model": "demo", "messages": messages})
        assert answer.status_code == 200, answer.text
        assert [item.content for item in mesh.worker.received[0].media.items] == [CAT]
        del messages[0]["content"][0]["type"]
        refused = await http.post("/v1/chat/completions", json={"model": "demo", "messages": messages})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages[0].content[0].type")


async def test_each_beam_has_the_images_of_its_prompt(checkpoint: Path) -> None:
    async with mesh_of_fakes(checkpoint) as mesh, mesh.http() as http:
        token = mesh.text.token_id("<image>")
        assert token is not None
        media = SimulatedMedia({"image": token}, most=2)

        def follows(request: request_pb2.GenerateRequest) -> Iterable[Delta]:
            (delta,) = tokens([70])
            top = [request_pb2.TokenLogprob(token_id=70 + rank, logprob=-1.0 - rank) for rank in range(4)]
            delta.logprobs.append(request_pb2.PositionLogprobs(chosen=top[0], top=top))
            return [delta]

        worker = await mesh.add_worker(follows, attributes={"media": announced(media.facts)})
        worker.expand = media.expand
        body = {"model": "demo", "messages": asking(CAT), "use_beam_search": True, "n": 2, "max_tokens": 3}
        answer = await http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["choices"]) == 2
        assert len(mesh.worker.received) > 3
        for request in mesh.worker.received:
            told = prompt_media(request.media)
            assert [item.content for item in told.items] == [CAT]
            assert media.expand(told).token_ids == tuple(request.prompt_token_ids)


async def test_a_model_of_text_alone_says_so(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, lambda _: tokens([5])) as mesh, mesh.client() as client:
        with pytest.raises(openai.BadRequestError, match="not a multimodal model") as refused:
            await client.chat.completions.create(model="demo", messages=asking(CAT))
        assert refused.value.param == "messages[0].content[1].image_url"
        assert mesh.worker.received == []


async def test_bytes_are_bounded(checkpoint: Path) -> None:
    async with seeing(checkpoint, max_media_bytes=40, max_held_media_bytes=200) as (mesh, _), mesh.client() as client:
        await client.chat.completions.create(model="demo", messages=asking(CAT, DOG))
        for messages, n in ((asking(bytes(41)), 1), (asking(bytes(20), bytes(21)), 1), (asking(bytes(21)), 2)):
            with pytest.raises(openai.BadRequestError, match="--max-media-bytes"):
                await client.chat.completions.create(model="demo", messages=messages, n=n)
        mesh.service.media.hold(190)
        with pytest.raises(openai.InternalServerError) as full:
            await client.chat.completions.create(model="demo", messages=asking(CAT))
        assert (full.value.status_code, full.value.code) == (503, "media_full")
        mesh.service.media.hold(-190)
        assert mesh.service.media.held_bytes == 0
        assert mesh.metric("media_bytes") == 0


def called(uuid: str, content: bytes | None = None) -> Any:
    image = None if content is None else {"url": data_url(content)}
    part = {"type": "image_url", "image_url": image, "uuid": uuid}
    return [{"role": "user", "content": [{"type": "text", "text": "See: "}, part]}]


async def test_an_image_is_known_by_its_uuid_alone(checkpoint: Path) -> None:
    async with seeing(checkpoint) as (mesh, _), mesh.client() as client, mesh.http() as http:
        with pytest.raises(openai.BadRequestError, match="send it once more") as unknown:
            await client.chat.completions.create(model="demo", messages=called("pet"))
        assert (unknown.value.param, unknown.value.code) == ("messages[0].content[1].image_url", "media_unknown")
        for messages in (called("pet", CAT), called("pet"), called("pet", DOG), called("pet")):
            await client.chat.completions.create(model="demo", messages=messages)
        told = [[item.content for item in prompt_media(each.media).items] for each in mesh.worker.received]
        assert told == [[CAT], [CAT], [DOG], [DOG]]
        first, second, *_ = mesh.worker.received
        assert first.prompt_token_ids == second.prompt_token_ids
        assert mesh.metric("named_media_bytes") == mesh.service.media.named.size_bytes > len(DOG)
        assert mesh.service.media.held_bytes == 0
        body = {"model": "demo", "messages": called("pet")}
        assert (await http.post("/tokenize", json=body)).json()["count"] == len(first.prompt_token_ids)


async def test_a_named_image_counts_in_each_request(checkpoint: Path) -> None:
    async with seeing(checkpoint, max_media_bytes=40) as (mesh, _), mesh.client() as client:
        await client.chat.completions.create(model="demo", messages=called("pet", bytes(30)))
        with pytest.raises(openai.BadRequestError, match="--max-media-bytes"):
            await client.chat.completions.create(model="demo", messages=called("pet"), n=2)
        assert mesh.service.media.held_bytes == 0


async def test_in_the_words_of_the_other_apis(checkpoint: Path) -> None:
    async with seeing(checkpoint) as (mesh, _), mesh.client() as client, mesh.http() as http:
        part = {"type": "input_image", "image_url": data_url(CAT)}
        content: Any = [{"type": "input_text", "text": "See: "}, part]
        response = await client.responses.create(model="demo", input=[{"role": "user", "content": content}])
        assert response.output_text == "A cat."
        source = {"type": "base64", "media_type": "image/png", "data": b64encode(CAT).decode()}
        blocks = [{"type": "text", "text": "See: "}, {"type": "image", "source": source}]
        body = {"model": "demo", "max_tokens": 50, "messages": [{"role": "user", "content": blocks}]}
        message = (await http.post("/v1/messages", json=body)).json()
        assert message["content"][0]["text"] == "A cat."
        first, second = mesh.worker.received
        assert (first.media, first.prompt_token_ids) == (second.media, second.prompt_token_ids)
        del body["max_tokens"]
        counted = (await http.post("/v1/messages/count_tokens", json=body)).json()
        tokenized = (await http.post("/tokenize", json={"model": "demo", "messages": asking(CAT)})).json()
        assert counted["input_tokens"] == tokenized["count"] == len(first.prompt_token_ids)
