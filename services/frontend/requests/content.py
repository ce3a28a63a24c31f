"""What stands in a message, as its model's chat template takes it."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from controlplane.model.media_facts import MediaFacts
from services.frontend.media.parts import MODALITY_OF, is_media

TextOrParts = str | list[dict[str, Any]]


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
        """Of the next message."""
        content = message.get("content")
        parts: list[Any] = content if isinstance(content, list) else []
        if not self._takes_parts or (message["role"] == "tool" and not any(map(is_media, parts))):
            text = text_of(message)
            placeholders = [mark for part in parts if is_media(part) and (mark := self._placeholder(part))]
            return "\n".join(filter(None, (*_missing(placeholders, text), text)))
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        return [
            {"type": MODALITY_OF[part["type"]]} if is_media(part) else {"type": "text", "text": part.get("text") or ""}
            for part in parts
        ]

    def _placeholder(self, part: Mapping[str, Any]) -> str:
        modality = MODALITY_OF[part["type"]]
        self._counts[modality] += 1
        return self._takes[modality].placeholder_of(self._counts[modality]) if modality in self._takes else ""


def text_of(message: Mapping[str, Any]) -> str:
    """The texts of a message, each in a line of its own."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(part.get("text") or "" for part in content if not is_media(part))
    return content or ""


def _missing(placeholders: list[str], text: str) -> list[str]:
    """Those that the text does not hold; a client may have written some where they belong."""
    missing: list[str] = []
    for placeholder, count in Counter(placeholders).items():
        missing += [placeholder] * (count - text.count(placeholder))
    return missing
