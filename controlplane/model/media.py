"""Images, recordings and films in a prompt.

A prompt is rendered with one placeholder for each of them. The engine's processor puts as many tokens in its place as
the model wants of it: the prompt is *expanded*, once, before it is placed, and its expanded tokens are its tokens
everywhere in the mesh. What they look like says nothing of the medium: two images of one size have the same tokens. So
block hashes and engines tell media apart by a hash of their content.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, Literal, TypeAlias, get_args

Modality: TypeAlias = Literal["image", "audio", "video"]
MODALITIES: Final[tuple[Modality, ...]] = get_args(Modality)

MAX_MEDIA_BYTES: Final = 48 * 1024 * 1024
"""Of one request. With its tokens it has to fit a message between two processes (`mesh.rpc.limits`)."""
HASH_CHARACTERS: Final = 32


@dataclass(frozen=True, slots=True)
class Media:
    """One medium of a prompt, as its client sent it."""

    modality: str
    """One of `MODALITIES`."""
    content: bytes
    """The file: PNG, JPEG, WAV and so on. Empty where it was left behind (see `PromptMedia.is_whole`)."""
    media_hash: str
    """See `media_hash`; by it engines find what they have computed of it before."""


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """The tokens of an expanded prompt that stand for a medium."""

    media_hash: str
    offset: int
    """Index of the first one."""
    length: int

    @property
    def end(self) -> int:
        """Index of the first token behind it."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class PromptMedia:
    """All that a prompt holds besides text."""

    items: tuple[Media, ...]
    """In the order of their placeholders, those of each modality."""
    template_token_ids: tuple[int, ...]
    """The prompt as it was rendered, before it was expanded: what the engine's processor takes."""
    spans: tuple[MediaSpan, ...] = ()
    """By offset. None before it is expanded."""

    @property
    def is_whole(self) -> bool:
        """Whether it can be computed: the contents are here."""
        return all(item.content for item in self.items)

    @property
    def content_bytes(self) -> int:
        """Of all media together."""
        return sum(len(item.content) for item in self.items)


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    """What an engine's processor makes of a prompt with media."""

    token_ids: tuple[int, ...]
    spans: tuple[MediaSpan, ...]


def media_hash(modality: str, content: bytes) -> str:
    """The same in every process; 128 bits, for engines trust it."""
    return sha256(modality.encode() + b":" + content).hexdigest()[:HASH_CHARACTERS]


def spans_within(spans: Sequence[MediaSpan], start: int, stop: int) -> list[MediaSpan]:
    """Those that have a token among start .. stop - 1."""
    return [span for span in spans if span.offset < stop and span.end > start]
