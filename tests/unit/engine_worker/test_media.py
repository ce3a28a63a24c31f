"""Images and the like in a worker: on the wire, at its door, and in the simulated engine."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.media import ExpandedPrompt, Media, MediaSpan, PromptMedia, media_hash
from controlplane.model.prefix_hash import block_hashes
from controlplane.model.request import EngineRequest, SamplingParams
from engine_worker import wire
from engine_worker.admission import refusal
from engine_worker.engines.simulated import SimulatedEngine
from engine_worker.engines.simulated_media import SimulatedMedia
from engine_worker.request_table import Adoption
from mesh.errors import RequestRefused
from mesh.runtime import SystemClock
from penstock.testing.engine import GREEDY, Answer, EngineDriver
from simulator.cost.linear import LinearCost
from tests.unit.engine_worker.test_simulated_engine import CONFIG

IMAGE, AUDIO = 900, 901
MODEL = SimulatedMedia({"image": IMAGE, "audio": AUDIO}, most=3)
CAT, DOG = b"picture of a cat" * 9, b"picture of a dog" * 9


def medium(content: bytes, modality: str = "image") -> Media:
    return Media(modality, content, media_hash(modality, content))


def request(*contents: bytes, request_id: str = "a") -> EngineRequest:
    media = PromptMedia(tuple(map(medium, contents)), (6, 7, *[IMAGE] * len(contents), 8))
    expanded = MODEL.expand(media)
    media = replace(media, spans=expanded.spans)
    return EngineRequest(request_id, expanded.token_ids, replace(GREEDY, max_tokens=20), media=media)


@pytest_asyncio.fixture
async def driver() -> AsyncIterator[EngineDriver]:
    engine = SimulatedEngine(CONFIG, LinearCost(), SystemClock(), time_scale=0.01, media=MODEL)
    reading = EngineDriver(engine, await engine.start(), 10.0)
    yield reading
    await reading.close()


async def answer(driver: EngineDriver, asked: EngineRequest) -> Answer:
    found = driver.submit_request(asked)
    await driver.end_of(found)
    return found


@pytest.mark.live
async def test_answers_and_blocks_follow_from_what_is_in_an_image(driver: EngineDriver) -> None:
    cat, dog = request(CAT), request(DOG)
    assert cat.prompt_token_ids == dog.prompt_token_ids
    answers = [await answer(driver, replace(each, request_id=f"r{at}")) for at, each in enumerate((cat, dog, cat))]
    assert answers[0].token_ids == answers[2].token_ids != answers[1].token_ids
    assert [each.cached_tokens for each in answers] == [0, 0, (len(cat.prompt_token_ids) - 1) // 16 * 16]
    hashes = block_hashes(cat.prompt_token_ids, 16, spans=cat.media_spans)
    assert hashes
    await driver.until(lambda: driver.cached_hashes >= set(hashes))


@pytest.mark.live
async def test_it_goes_on_behind_what_was_emitted(driver: EngineDriver) -> None:
    asked = request(CAT, DOG)
    whole = (await answer(driver, asked)).token_ids
    rest = await answer(driver, replace(asked, request_id="b", emitted_token_ids=whole[:7]))
    assert whole[:7] + rest.token_ids == whole


async def test_other_tokens_than_its_own_are_refused(driver: EngineDriver) -> None:
    asked = request(CAT)
    for wrong in (
        replace(asked, prompt_token_ids=asked.prompt_token_ids[:-1]),
        replace(asked, media=request(DOG).media and replace(request(DOG).media, items=asked.media.items)),  # type: ignore[arg-type, union-attr]
    ):
        with pytest.raises(RequestRefused, match="other tokens"):
            driver.submit_request(wrong)


@given(st.lists(st.tuples(st.sampled_from(["image", "audio"]), st.binary(min_size=1, max_size=80)), max_size=5))
def test_each_medium_gets_its_place(contents: list[tuple[str, bytes]]) -> None:
    items = tuple(medium(content, modality) for modality, content in contents)
    placeholders = tuple({"image": IMAGE, "audio": AUDIO}[item.modality] for item in items)
    media = PromptMedia(items, (6, *placeholders, 7))
    if max(placeholders.count(IMAGE), placeholders.count(AUDIO)) > 3:
        with pytest.raises(RequestRefused, match="at most 3"):
            MODEL.expand(media)
        return
    expanded = MODEL.expand(media)
    assert [span.media_hash for span in expanded.spans] == [item.media_hash for item in items]
    end = 1
    for span, placeholder in zip(expanded.spans, placeholders, strict=True):
        assert span.offset == end
        assert set(expanded.token_ids[span.offset : span.end]) == {placeholder}
        end = span.end
    assert expanded.token_ids[end:] == (7,)


@pytest.mark.parametrize(
    ("items", "template"), [((CAT,), (6, 7)), ((CAT, CAT, CAT, CAT), (IMAGE,) * 4), ((CAT, CAT), (IMAGE, 7))]
)
def test_what_has_no_place_is_refused(items: tuple[bytes, ...], template: tuple[int, ...]) -> None:
    with pytest.raises(RequestRefused):
        MODEL.expand(PromptMedia(tuple(map(medium, items)), template))


def test_a_placeholder_without_an_image_is_a_token() -> None:
    assert MODEL.expand(PromptMedia((), (6, IMAGE))) == ExpandedPrompt((6, IMAGE), ())


def test_media_cross_process_borders_as_they_are() -> None:
    asked = request(CAT, DOG)
    message = wire.generate_message(asked, model="m", deadline_ms=1, epoch=1)
    assert wire.engine_request(message) == asked


@pytest.mark.parametrize("mebibytes", [3, 5])
def test_an_adopting_frontend_gets_no_more_than_its_stream_bears(mebibytes: int) -> None:
    contents = [bytes([number]) * (mebibytes << 20) for number in (1, 2)]
    adoptions = [Adoption(replace(request(content), request_id=str(at)), 1) for at, content in enumerate(contents)]
    message = wire.adopted_message("a", 1, adoptions, model="m", now_s=0.0)
    first, second = (wire.engine_request(each.request) for each in message.adopted.requests)
    assert first == adoptions[0].request
    assert (second == adoptions[1].request) == (mebibytes == 3)
    left = refusal(second, asked_model="m", served_model="m")
    assert (left is None) == (mebibytes == 3)
    assert message.ByteSize() < 12 << 20


@pytest.mark.parametrize(
    "spans",
    [
        (MediaSpan("none", 2, 3),),
        (MediaSpan(media_hash("image", CAT), 2, 0),),
        (MediaSpan(media_hash("image", CAT), 2, 9999),),
        (MediaSpan(media_hash("image", CAT), 2, 5), MediaSpan(media_hash("image", CAT), 6, 5)),
    ],
)
def test_a_worker_s_door(spans: tuple[MediaSpan, ...]) -> None:
    asked = request(CAT)
    assert refusal(asked, asked_model="m", served_model="m") is None
    assert asked.media is not None
    wrong = replace(asked, media=replace(asked.media, spans=spans))
    assert "no place" in (refusal(wrong, asked_model="m", served_model="m") or "")
    strange = replace(asked, media=replace(asked.media, items=(replace(medium(CAT), modality="smell"),)))
    assert "'smell' is none of" in (refusal(strange, asked_model="m", served_model="m") or "")


def test_a_sampling_parameter_is_checked_all_the_same() -> None:
    asked = replace(request(CAT), sampling=SamplingParams(max_tokens=5, temperature=-1.0))
    assert refusal(asked, asked_model="m", served_model="m") is not None
