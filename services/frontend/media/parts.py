"""Which parts of a conversation are images, recordings or films, and what is wrong with one."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from controlplane.model.media_facts import MediaFacts
from services.frontend.errors import bad_request

MODALITY_OF: Final[Mapping[str, str]] = {
    "image_url": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "video_url": "video",
}
"""By the type of a part, which is the name of the field with its content, too."""
_OTHER_FIELDS: Final = frozenset(("type", "cache_control", "uuid"))
"""Beside the content. `cache_control` is without effect."""
_CONTENT_FIELDS: Final[Mapping[str, frozenset[str]]] = {
    "image_url": frozenset(("url", "detail")),
    "audio_url": frozenset(("url",)),
    "input_audio": frozenset(("data", "format")),
    "video_url": frozenset(("url",)),
}


@dataclass(frozen=True, slots=True)
class MediaPart:
    """One of them."""

    modality: str
    url: str
    """http, https, file or data; empty for one that is known by its `uuid` alone."""
    param: str
    """Where it stands in the request, for errors."""
    uuid: str | None = None
    """The client's name for it."""


def is_media(part: Any) -> bool:
    """Whether a part of a message is something else than text."""
    return isinstance(part, Mapping) and part.get("type") in MODALITY_OF


def media_parts(messages: Sequence[Mapping[str, Any]]) -> list[MediaPart]:
    """In their order. Raises ApiError (400, `param` set) for one that is not in OpenAI's or vLLM's form."""
    found: list[MediaPart] = []
    for index, message in enumerate(messages):
        content = message.get("content")
        for part_index, part in enumerate(content if isinstance(content, list) else ()):
            if is_media(part):
                found.append(_media_part(part, f"messages[{index}].content[{part_index}]"))
    return found


def check_taken(parts: Sequence[MediaPart], model: str, takes: Mapping[str, MediaFacts]) -> None:
    """Raises ApiError (400) for what the model does not take, as vLLM does."""
    counts: Counter[str] = Counter()
    for part in parts:
        if not takes:
            message = f"`{model}` is not a multimodal model: it takes text only."
            raise bad_request(message, part.param, "unsupported_parameter")
        counts[part.modality] += 1
        most = takes[part.modality].most if part.modality in takes else 0
        if counts[part.modality] > most:
            message = f"At most {most} {part.modality}(s) may be provided in one prompt of `{model}`."
            raise bad_request(message, part.param)


def unknown_fields(part: Mapping[str, Any], param: str) -> Iterator[str]:
    """Where a part holds what means nothing here."""
    kind = part["type"]
    yield from (f"{param}.{name}" for name in part.keys() - _OTHER_FIELDS - {kind})
    content = part.get(kind)
    if isinstance(content, Mapping):
        yield from (f"{param}.{kind}.{name}" for name in content.keys() - _CONTENT_FIELDS[kind])


def _media_part(part: Mapping[str, Any], param: str) -> MediaPart:
    kind = part["type"]
    content, param = part.get(kind), f"{param}.{kind}"
    uuid = None if part.get("uuid") is None else str(part["uuid"])
    if uuid is not None and kind in part and _is_empty(content):
        return MediaPart(MODALITY_OF[kind], "", param, uuid)
    if isinstance(content, str) and kind != "input_audio":
        content = {"url": content}
    if not isinstance(content, Mapping):
        raise bad_request(f"`{param}` must be an object.", param, "invalid_value")
    if kind == "input_audio":
        form = _text(content.get("format", "wav"), f"{param}.format")
        url = f"data:audio/{form};base64,{_text(content.get('data'), f'{param}.data')}"
    else:
        url = _text(content.get("url"), f"{param}.url")
    return MediaPart(MODALITY_OF[kind], url, param, uuid)


def _is_empty(content: Any) -> bool:
    """Whether a part brings nothing but its `uuid`: null, or an object without a URL or data."""
    if isinstance(content, Mapping):
        return not (content.get("url") or content.get("data"))
    return content is None or content == ""


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise bad_request(f"`{param}` must be a text that is not empty.", param, "invalid_value")
    return value
