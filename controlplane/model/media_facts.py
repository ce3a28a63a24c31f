"""What a model takes besides text: announced by its workers, needed by frontends to render prompts."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from json import dumps, loads
from typing import Any


@dataclass(frozen=True, slots=True)
class MediaFacts:
    """Of one modality."""

    most: int
    """How many of them one prompt may hold."""
    placeholder: str = ""
    """What stands for one in a prompt where the chat template does not write it itself; `{i}` is its number, from 1 on.
    Empty: nothing does."""

    def placeholder_of(self, number: int) -> str:
        """Of the `number`th one in a prompt, counted from 1."""
        return self.placeholder.replace("{i}", str(number))


def announced(facts: Mapping[str, MediaFacts]) -> str:
    """As a worker's attribute; empty for a model of text alone."""
    return dumps({name: asdict(each) for name, each in facts.items()}, sort_keys=True) if facts else ""


def facts_of(attribute: str) -> dict[str, MediaFacts]:
    """From such an attribute. Raises ValueError for what is none."""
    try:
        told: dict[str, Any] = loads(attribute) if attribute else {}
        return {name: MediaFacts(int(each["most"]), str(each["placeholder"])) for name, each in told.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not what a model takes besides text: {attribute!r}") from error
