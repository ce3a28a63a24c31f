"""Engines whose models take images, recordings or films besides text."""

from collections.abc import Mapping
from typing import Protocol, TypeGuard

from controlplane.model.media import ExpandedPrompt, PromptMedia
from controlplane.model.media_facts import MediaFacts
from engine_worker.engines.interface import Engine
from mesh.errors import RequestRefused


class MediaEngine(Engine, Protocol):
    """Takes requests with `media`. It computes them from their template and contents, and refuses one whose expanded
    tokens are not those that it makes of them."""

    @property
    def media(self) -> Mapping[str, MediaFacts]:
        """What its model takes, by modality, once started; empty for a model of text alone."""

    async def expand(self, media: PromptMedia) -> ExpandedPrompt:
        """Put in the place of each placeholder of the template the tokens of its medium. Raises RequestRefused for what
        cannot be read or is too much, and EngineFailed."""


def takes_media(engine: Engine) -> TypeGuard[MediaEngine]:
    """Whether this engine, started, serves a model that takes more than text."""
    return bool(getattr(engine, "media", {}))


def check_expanded(request_token_ids: tuple[int, ...], media: PromptMedia, expanded: ExpandedPrompt) -> None:
    """Raises RequestRefused where a request's tokens are not those that its media make here."""
    if expanded.token_ids != request_token_ids or expanded.spans != media.spans:
        raise other_tokens(len(expanded.token_ids), len(request_token_ids))


def other_tokens(here: int, elsewhere: int) -> RequestRefused:
    """Of a request whose tokens are not those that this engine makes of its media."""
    return RequestRefused(
        f"this instance makes other tokens of the prompt with its images ({here}) than the one that it was expanded by "
        f"({elsewhere}): do they run the same model and the same version?"
    )
