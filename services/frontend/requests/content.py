"""What stands in a message, as its model's chat template takes it."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from controlplane.model.media_facts import MediaFacts
from services.frontend.media.parts import MODALITY_OF, is_media

TextOrParts = str | list[dict[str, Any]]
_KNOWN_FIELDS: Final = frozenset(
    (
        *("type", "text", "refusal", "thinking", "image_url", "input_audio", "audio_url", "video_url", "file", "uuid"),
        *("image_embeds", "audio_embeds", "video_embeds", "image_pil", "data", "name", "closed"),
        "prompt_cache_breakpoint",
    )
)
"""Of parts of a message, as vLLM has them: all others are passed on to a template that goes through parts."""
_BILLING_HEADER: Final = "x-anthropic-billing-header"


class ContentWriter:
    """Writes the messages of one conversation, in order, as vLLM does.

    A template that goes through parts is given them: texts as they are, and of an image that it is one. Any other gets
    a text: the texts in lines, and before them the model's placeholder for each image that they do not hold already.
    """

    def __init__(self, *, takes_parts: bool, takes: Mapping[str, MediaFacts]) -> None:
        """`takes`: what the model takes besides text."""
        self._takes_parts = takes_parts
        self._takes = takes
        self._counts: Counter[str] = Counter()
        """Media so far, by modality."""

    def content(self, message: Mapping[str, Any]) -> TextOrParts:
        """What the template gets of the next message."""
        content = message.get("content")
        if message["role"] == "system":
            content = _without_billing_header(content)
            message = {**message, "content": content}
        parts: list[Any] = content if isinstance(content, list) else []
        if self._takes_parts and message["role"] == "tool" and not any(map(is_media, parts)):
            return "\n".join(part.get("text") or "" for part in parts) if parts else content or ""
        if not self._takes_parts:
            text = text_of(message)
            placeholders = [mark for part in parts if is_media(part) and (mark := self._placeholder(part))]
            return "\n".join(filter(None, (*_missing(placeholders, text), text)))
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        return [_for_template(part) for part in parts]

    def _placeholder(self, part: Mapping[str, Any]) -> str:
        modality = MODALITY_OF[part["type"]]
        self._counts[modality] += 1
        return self._takes[modality].placeholder_of(self._counts[modality]) if modality in self._takes else ""


def _for_template(part: Mapping[str, Any]) -> dict[str, Any]:
    """With the fields that nobody knows but, perhaps, the template."""
    others = {name: value for name, value in part.items() if name not in _KNOWN_FIELDS}
    if is_media(part):
        return {"type": MODALITY_OF[part["type"]], **others}
    return {"type": "text", "text": part.get("text") or "", **others}


def is_billing_line(text: str) -> bool:
    """Whether a text of a system begins with the line by which Claude Code says who pays."""
    return text.startswith(_BILLING_HEADER)


def _without_billing_header(content: Any) -> Any:
    """A system's message without the line by which Claude Code says who pays. It has another value in each request, so
    that no prefix of the prompt would be cached from there on."""
    if isinstance(content, str):
        return (_without_first_line(content) or []) if is_billing_line(content) else content
    if not isinstance(content, list):
        return content
    kept = []
    for part in content:
        text = part.get("text") if part.get("type") == "text" else None
        if not isinstance(text, str) or not is_billing_line(text):
            kept.append(part)
        elif rest := _without_first_line(text):
            kept.append({**part, "text": rest})
    return kept


def _without_first_line(text: str) -> str:
    return text.partition("\n")[2]


def text_of(message: Mapping[str, Any]) -> str:
    """The texts of a message that are not empty, each in a line of its own."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(text for part in content if not is_media(part) and (text := part.get("text")))
    return content or ""


def _missing(placeholders: list[str], text: str) -> list[str]:
    """Those that the text does not hold; a client may have written some where they belong."""
    missing: list[str] = []
    for placeholder, count in Counter(placeholders).items():
        missing += [placeholder] * (count - text.count(placeholder))
    return missing
