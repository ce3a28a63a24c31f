"""Images and the like among the parts of messages."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.media_facts import MediaFacts, announced, facts_of
from services.frontend.errors import ApiError
from services.frontend.media.parts import MediaPart, check_taken, media_parts, unknown_fields
from services.frontend.requests.content import ContentWriter

PICTURE: Any = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
SOUND: Any = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "mp3"}}
IMAGES = {"image": MediaFacts(2, "<image>")}


def said(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {
        "role": role,
        "content": [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts],
    }


def test_parts_are_found_in_their_order() -> None:
    messages = [{"role": "system", "content": "hush"}, said("What is", PICTURE, SOUND)]
    assert media_parts(messages) == [
        MediaPart("image", "https://example.org/cat.png", "messages[1].content[1].image_url"),
        MediaPart("audio", "data:audio/mp3;base64,UklGRg==", "messages[1].content[2].input_audio"),
    ]


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url"}, "image_url"),
        ({"type": "image_url", "image_url": {}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": ""}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": 7}}, "image_url.url"),
        ({"type": "input_audio", "input_audio": "a"}, "input_audio"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, "input_audio.data"),
        ({"type": "video_url", "video_url": [1]}, "video_url"),
    ],
)
def test_a_wrong_part_is_named(part: Any, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        media_parts([said("a", part)])
    assert refused.value.param == f"messages[0].content[1].{param}"
    assert refused.value.status == 400


@pytest.mark.parametrize("content", [None, {}, {"url": None}, {"url": ""}, "", {"data": None}])
@pytest.mark.parametrize("kind", ["image_url", "input_audio", "audio_url", "video_url"])
def test_a_uuid_stands_for_a_content_that_is_not_there(kind: str, content: Any) -> None:
    (part,) = media_parts([said({"type": kind, kind: content, "uuid": 7})])
    assert (part.url, part.uuid) == ("", "7")
    with pytest.raises(ApiError):
        media_parts([said({"type": kind, kind: content})])


def test_a_uuid_needs_the_field_of_its_medium() -> None:
    with pytest.raises(ApiError, match="must be an object"):
        media_parts([said({"type": "image_url", "uuid": "u"})])


def test_a_uuid_beside_a_content_names_it() -> None:
    assert media_parts([said({**PICTURE, "uuid": "u"})]) == [
        MediaPart("image", "https://example.org/cat.png", "messages[0].content[0].image_url", "u")
    ]


def test_fields_without_meaning_are_found() -> None:
    part = {"type": "image_url", "image_url": {"url": "a", "detail": "low", "size": 7}, "uuid": "u", "text": "b"}
    assert len(media_parts([said("a", part)])) == 1
    assert set(unknown_fields(part, "p")) == {"p.text", "p.image_url.size"}


def refusal(messages: list[dict[str, Any]]) -> str | None:
    """The parameter that is wrong, if one is."""
    try:
        (part,) = media_parts(messages)
    except ApiError as refused:
        return refused.param
    assert part.url or part.uuid
    return None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "url", "data"]), inner),
    max_leaves=6,
)


@given(st.sampled_from(["image_url", "input_audio", "audio_url", "video_url"]), JSON, JSON)
def test_any_part_is_read_or_refused(kind: str, content: Any, other: Any) -> None:
    told = refusal([{"role": "user", "content": [{"type": kind, kind: content, "uuid": other}]}])
    assert told is None or told.startswith("messages[0].content[0]")


def test_a_model_of_text_alone_refuses_images() -> None:
    with pytest.raises(ApiError, match="is not a multimodal model") as refused:
        check_taken(media_parts([said("a", PICTURE)]), "demo", {})
    assert refused.value.param == "messages[0].content[1].image_url"


def test_no_more_than_the_model_takes() -> None:
    check_taken(media_parts([said(PICTURE, PICTURE)]), "demo", IMAGES)
    with pytest.raises(ApiError, match=r"At most 2 image\(s\)") as refused:
        check_taken(media_parts([said(PICTURE), said(PICTURE, PICTURE)]), "demo", IMAGES)
    assert refused.value.param == "messages[1].content[1].image_url"
    with pytest.raises(ApiError, match=r"At most 0 audio\(s\)"):
        check_taken(media_parts([said(SOUND)]), "demo", IMAGES)


def test_a_template_of_parts_gets_parts() -> None:
    writer = ContentWriter(takes_parts=True, takes=IMAGES)
    assert writer.content(said("What is", PICTURE)) == [{"type": "text", "text": "What is"}, {"type": "image"}]
    assert writer.content({"role": "user", "content": "Hm"}) == [{"type": "text", "text": "Hm"}]
    assert writer.content({"role": "tool", "content": [{"type": "text", "text": "a"}]}) == "a"
    moody = [{"type": "text", "text": "", "mood": "good", "uuid": "1"}, {**PICTURE, "mood": "bad"}]
    told = [{"type": "text", "text": "", "mood": "good"}, {"type": "image", "mood": "bad"}]
    assert writer.content({"role": "user", "content": moody}) == told
    assert writer.content({"role": "assistant", "content": None}) == []


def test_any_other_template_gets_the_models_placeholders() -> None:
    writer = ContentWriter(takes_parts=False, takes={"image": MediaFacts(9, "<|image_{i}|>")})
    assert writer.content(said("What", "is", PICTURE, PICTURE)) == "<|image_1|>\n<|image_2|>\nWhat\nis"
    assert writer.content({"role": "user", "content": "Hm"}) == "Hm"
    assert writer.content(said("It is <|image_3|> here", PICTURE)) == "It is <|image_3|> here"
    assert writer.content(said(PICTURE)) == "<|image_4|>"
    assert ContentWriter(takes_parts=False, takes={"image": MediaFacts(9)}).content(said("a", PICTURE)) == "a"


@pytest.mark.parametrize("takes_parts", [False, True])
def test_who_pays_is_no_part_of_a_prompt(takes_parts: bool) -> None:
    """Claude Code says it in a line that differs from request to request."""
    writer = ContentWriter(takes_parts=takes_parts, takes={})

    def told(content: Any, role: str = "system") -> Any:
        return writer.content({"role": role, "content": content})

    def part(text: str) -> dict[str, str]:
        return {"type": "text", "text": text}

    header = "x-anthropic-billing-header: cch=1;"
    for content in (f"{header}\nBe brief.", [part(f"{header}\nBe brief.")], [part(header), part("Be brief.")]):
        assert told(content) == ([part("Be brief.")] if takes_parts else "Be brief.")
    for content in (header, [part(header)]):
        assert told(content) == ([] if takes_parts else "")
    assert told(header, role="user") == ([part(header)] if takes_parts else header)


def test_what_a_model_takes_is_announced() -> None:
    assert facts_of(announced(IMAGES)) == IMAGES
    assert facts_of(announced({})) == {}
    for wrong in ("[]", "{", '{"image": 1}', '{"image": {"most": "x", "placeholder": ""}}'):
        with pytest.raises(ValueError, match=r"."):
            facts_of(wrong)
