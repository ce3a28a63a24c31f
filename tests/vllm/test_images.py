"""Images through two vLLM engines: the answers of a plain vLLM, whatever happens to the request on its way."""

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from controlplane.media_message import prompt_media, span_messages
from controlplane.model.media import Media, PromptMedia, media_hash
from controlplane.model.prefix_hash import block_hashes
from controlplane.model.request import EngineRequest, SamplingParams
from engine_worker.engines.vllm.engine import VllmEngine
from engine_worker.engines.vllm.settings import VllmSettings
from mesh.errors import RequestRefused
from mesh.runtime import SystemThreads
from penstock.testing.engine import GREEDY, EngineDriver
from penstock.v1 import request_pb2
from services.frontend.media.fetcher import MediaFetcher
from services.frontend.media.parts import MediaPart
from services.frontend.media.rules import MediaRules
from services.frontend.media.service import ExpandedMedia
from services.frontend.requests.models import ServedModel
from services.frontend.requests.plan import plan_chat
from services.frontend.requests.schema import ChatCompletionRequest
from services.frontend.text.model_text import ModelText
from tests.unit.services.frontend.text.test_chat_template import TEMPLATES
from tests.vllm.moving import BLOCK_TOKENS, Migration, Side
from tests.vllm.tiny_images import make_tiny_idefics, png

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

CAT, DOG = png(3), png(5)
"""Of one size."""
LONG = "a story that goes on and on, with a picture in it and no end; " * 12
SHORT = "and what else is there to be seen on this one of them? "
TOKENS = 400
_ids = count()


@dataclass(frozen=True)
class Sight:
    """Two engines of one model that takes images, and what a frontend knows of it."""

    source: Side
    target: Side
    model: ServedModel

    async def request(self, messages: Sequence[Mapping[str, Any]], sampling: SamplingParams = GREEDY) -> EngineRequest:
        """As a frontend makes it."""
        body = ChatCompletionRequest(messages=[dict(message) for message in messages], max_tokens=TOKENS)
        loader: Any = _Loader(self.source.engine)
        plan = await plan_chat(body, "chat", self.model, SystemThreads(), loader)
        (prompt,) = plan.prompts
        media = None if prompt.media is None else prompt_media(prompt.media)
        sampling = replace(sampling, max_tokens=TOKENS)
        return EngineRequest(f"sight-{next(_ids)}", tuple(prompt.token_ids), sampling, media=media)

    async def answer(self, side: Side, request: EngineRequest) -> tuple[int, ...]:
        request = replace(request, request_id=f"sight-{next(_ids)}")
        answer = side.driver.submit_request(request)
        await side.driver.end_of(answer)
        return answer.token_ids


class _Loader:
    """Expands by an engine at hand."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    async def expand(
        self, model: str, parts: Sequence[MediaPart], template_token_ids: Sequence[int], copies: int
    ) -> ExpandedMedia:
        fetcher = MediaFetcher(MediaRules(1 << 20), 5.0, SystemThreads())
        contents = [await fetcher.fetch(part.url, 1 << 20, part.param) for part in parts]
        items = [
            Media(part.modality, content, media_hash(part.modality, content))
            for part, content in zip(parts, contents, strict=True)
        ]
        expanded = await self._engine.expand(PromptMedia(tuple(items), tuple(template_token_ids)))
        message = request_pb2.PromptMedia(
            items=[
                request_pb2.Media(modality=item.modality, content=item.content, media_hash=item.media_hash)
                for item in items
            ],
            template_token_ids=template_token_ids,
            spans=span_messages(expanded.spans),
        )
        return ExpandedMedia(list(expanded.token_ids), message)


def said(*parts: str | bytes) -> list[dict[str, Any]]:
    return [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": part}
                if isinstance(part, str)
                else {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(part).decode()}"}}
                for part in parts
            ],
        }
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sight(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sight]:
    path: Path = tmp_path_factory.mktemp("idefics")
    await asyncio.to_thread(make_tiny_idefics, path)
    settings = VllmSettings(
        model_path=str(path),
        dtype="float32",
        block_size=BLOCK_TOKENS,
        max_model_len=2048,
        kv_cache_memory_bytes=96 << 20,
        max_num_batched_tokens=256,
        others=("limit_mm_per_prompt.image=3",),
    )
    engines = VllmEngine(settings), VllmEngine(settings)
    limits = [await engine.start() for engine in engines]  # not at once: vLLM renews metrics of the whole process
    source, target = (
        Side(engine, EngineDriver(engine, limit, 60.0)) for engine, limit in zip(engines, limits, strict=True)
    )
    text = ModelText.load(path, lambda: 0.0)
    yield Sight(source, target, ServedModel("eyes", text, BLOCK_TOKENS, 2048, 0, media=source.engine.media))
    await source.driver.close()
    await target.driver.close()


async def plain_vllm(side: Side, messages: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Prompt and greedy answer by vLLM's own rendering and processing, from the messages on, with hashes of its own."""
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.renderers.params import ChatParams

    assert side.engine._core is not None
    llm = side.engine._core._llm
    template = {"add_generation_prompt": True}
    _, (prompt,) = await llm.renderer.render_chat_async([messages], ChatParams(chat_template_kwargs=template))
    params = VllmSamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    outputs = [output async for output in llm.generate(prompt, params, f"plain-{next(_ids)}")]
    return tuple(prompt["prompt_token_ids"]), tuple(outputs[-1].outputs[0].token_ids)


async def test_what_the_model_takes_is_known(sight: Sight) -> None:
    facts = sight.source.engine.media
    assert list(facts) == ["image"]
    assert facts["image"].placeholder == "<image>"
    assert facts["image"].most == 3


@pytest.mark.parametrize(
    "messages",
    [
        said("What is on ", CAT, " this?"),
        said(CAT),
        said("Compare ", CAT, " and ", DOG, " and ", png(7, 30, 20), "."),
        [*said("One: ", CAT), {"role": "assistant", "content": "A cat."}, *said(DOG, " and this one?")],
        said("No picture at all."),
    ],
)
async def test_answers_are_those_of_a_plain_vllm(sight: Sight, messages: Any) -> None:
    request = await sight.request(messages, replace(GREEDY, ignore_eos=True))
    prompt, answer = await plain_vllm(sight.source, messages)
    assert request.prompt_token_ids == prompt
    assert await sight.answer(sight.target, request) == answer
    assert len(answer) == TOKENS


@pytest.mark.parametrize("source", TEMPLATES)
async def test_vllm_finds_the_same_templates_to_go_through_parts(source: str) -> None:
    from vllm.renderers.hf import _detect_content_format

    assert (_detect_content_format(source, default="string") == "openai") is TEMPLATES[source]


async def test_an_image_is_found_in_the_cache_and_another_one_is_not(sight: Sight) -> None:
    before = SHORT * 3
    cat, dog = [await sight.request(said(before, picture, SHORT * 4)) for picture in (CAT, DOG)]
    assert cat.prompt_token_ids == dog.prompt_token_ids
    usable = (len(cat.prompt_token_ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    common = cat.media_spans[0].offset // BLOCK_TOKENS * BLOCK_TOKENS
    assert 0 < common < usable
    answers = []
    for request in (cat, replace(cat, request_id="again"), dog):
        answers.append(answer := sight.source.driver.submit_request(request))
        await sight.source.driver.end_of(answer)
    assert [answer.cached_tokens for answer in answers] == [0, usable, common]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].token_ids != answers[2].token_ids
    # The mesh names their blocks as its frontends do.
    for request in (cat, dog):
        hashes = block_hashes(request.prompt_token_ids, BLOCK_TOKENS, spans=request.media_spans)
        await sight.source.driver.until(lambda hashes=hashes: sight.source.driver.cached_hashes >= set(hashes))  # type: ignore[misc]
    assert sight.source.engine._block_map.unmapped_blocks_total == 0


@pytest.mark.parametrize("after", [1, 25])
async def test_recovered_after_some_tokens(sight: Sight, after: int) -> None:
    request = await sight.request(said("Go on: ", CAT, DOG), replace(GREEDY, ignore_eos=True))
    whole = await sight.answer(sight.source, request)
    # A placeholder among what was emitted is a token like any other.
    rest = await sight.answer(sight.target, replace(request, emitted_token_ids=whole[:after]))
    assert whole[:after] + rest == whole


@pytest.mark.parametrize("messages", [said("Short: ", CAT), said(LONG, CAT, LONG, DOG, SHORT)])
async def test_moved_in_mid_decode(sight: Sight, messages: Any) -> None:
    request = await sight.request(messages, replace(GREEDY, ignore_eos=True))
    expected = await sight.answer(sight.source, request)
    source, target = sight.source, sight.target
    answer = source.driver.submit_request(request)
    await source.driver.until(lambda: len(answer.token_ids) >= 10)
    migration = Migration(source, target, request, answer)
    await migration.offer()
    await source.driver.until(
        lambda: len(migration.progress.block_ids) >= len(request.prompt_token_ids) // BLOCK_TOKENS
    )
    await migration.round()
    paused = await migration.pause()
    continued = await migration.hand_off(paused)
    await target.driver.end_of(continued)
    assert 10 <= len(paused.emitted_token_ids) < TOKENS
    assert continued.cached_tokens == paused.computed_tokens
    assert answer.token_ids + continued.token_ids == expected


async def test_prefilled_here_and_decoded_there(sight: Sight) -> None:
    request = await sight.request(said(LONG, CAT, LONG, png(11), SHORT), replace(GREEDY, ignore_eos=True))
    source, target = sight.source, sight.target
    answer = source.driver.submit_request(request)
    migration = Migration(source, target, request, answer)
    await migration.offer()  # before its prompt is computed
    await source.driver.until(lambda: len(answer.token_ids) >= 1)
    await migration.round()
    continued = await migration.hand_off(await migration.pause())
    await target.driver.end_of(continued)
    assert answer.token_ids + continued.token_ids == await sight.answer(source, request)


async def test_what_cannot_be_read_is_refused(sight: Sight) -> None:
    engine = sight.source.engine
    broken = Media("image", b"no picture", "0" * 32)
    placeholder = (await sight.request(said(CAT))).media
    assert placeholder is not None
    with pytest.raises(RequestRefused, match="cannot be read"):
        await engine.expand(replace(placeholder, items=(broken,)))
    with pytest.raises(RequestRefused, match="cannot be read"):
        await engine.expand(replace(placeholder, template_token_ids=(5, 6, 7)))
    request = await sight.request(said("Look: ", CAT))
    assert request.media is not None
    other = replace(request, prompt_token_ids=(9, *request.prompt_token_ids[1:]))
    answer = sight.source.driver.submit_request(other)
    await sight.source.driver.end_of(answer)
    assert "other tokens" in answer.deltas[-1].error


async def test_taken_back_while_it_is_read(sight: Sight) -> None:
    request = await sight.request(said("Look: ", png(13, 800, 600)))
    answer = sight.source.driver.submit_request(request)
    sight.source.engine.abort(request.request_id)
    await sight.source.driver.end_of(answer)
    assert answer.token_ids == ()
    assert await sight.answer(sight.source, request)
