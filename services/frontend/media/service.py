"""From the images of a conversation to the tokens of its prompt, and the memory that they take until it is answered."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from controlplane.model.media import media_hash
from mesh.runtime import Threads
from penstock.v1 import request_pb2
from services.frontend.errors import ApiError, bad_request, unavailable
from services.frontend.media.expander import Expander
from services.frontend.media.fetcher import MediaFetcher, in_thread_if_large
from services.frontend.media.named import MediaName, NamedMedia
from services.frontend.media.parts import MediaPart
from services.frontend.media.rules import too_large
from services.frontend.metrics import FrontendMetrics

MAX_FETCHES: Final = 8
"""Of one request at once."""


@dataclass(frozen=True, slots=True)
class ExpandedMedia:
    """A prompt with the tokens of its media."""

    token_ids: list[int]
    media: request_pb2.PromptMedia


@dataclass(slots=True)
class MediaService:
    """Of one frontend."""

    fetcher: MediaFetcher
    expander: Expander
    named: NamedMedia
    max_bytes: int
    """Of one request, its copies for several answers included."""
    max_held_bytes: int
    """Of all requests that run."""
    wait_s: float
    """For an instance that can expand a prompt."""
    metrics: FrontendMetrics
    clock: Callable[[], float]
    threads: Threads
    held_bytes: int = 0

    @contextmanager
    def held(self, ends_s: float, tenant: str) -> Iterator["MediaLoader"]:
        """What is loaded inside, for one request of this tenant that ends by then, counts as held until it is left:
        the request may have to be placed again."""
        loader = MediaLoader(self, ends_s, tenant)
        try:
            yield loader
        finally:
            self.hold(-loader.held_bytes)

    def hold(self, size_bytes: int) -> None:
        """Raises ApiError (503) where that is too much."""
        if size_bytes > 0 and self.held_bytes + size_bytes > self.max_held_bytes:
            raise unavailable(
                "The requests that run here have as many images, recordings and films as fit; try again.", "media_full"
            )
        self.held_bytes += size_bytes
        self.metrics.media_bytes.set(self.held_bytes)

    async def stop(self) -> None:
        """Close the connections."""
        await self.fetcher.stop()


@dataclass(slots=True)
class MediaLoader:
    """Loads the media of one request."""

    service: MediaService
    ends_s: float
    tenant: str
    held_bytes: int = field(default=0)

    async def expand(
        self, model: str, parts: Sequence[MediaPart], template_token_ids: Sequence[int], copies: int
    ) -> ExpandedMedia:
        """`copies`: how many answers are wanted, each of which is a request of its own to a worker. Raises ApiError."""
        service = self.service
        left_bytes = service.max_bytes // copies
        turns = asyncio.Semaphore(MAX_FETCHES)
        known = [None if part.url else self._known(part) for part in parts]

        async def load(part: MediaPart, media: request_pb2.Media | None) -> request_pb2.Media:
            nonlocal left_bytes
            async with turns:
                content = media.content if media else await service.fetcher.fetch(part.url, left_bytes, part.param)
                left_bytes -= len(content)
                if left_bytes < 0:
                    raise too_large(service.max_bytes, part.param)
                self._hold(len(content) + len(part.url))
                if media is None:
                    told = await in_thread_if_large(service.threads, len(content), media_hash, part.modality, content)
                    media = request_pb2.Media(modality=part.modality, content=content, media_hash=told)
                return media

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(load(*each)) for each in zip(parts, known, strict=True)]
        except BaseExceptionGroup as errors:
            service.metrics.media_failures.inc()
            raise _first(errors) from errors
        items = [task.result() for task in tasks]
        self._keep_named(parts, items)
        media = request_pb2.PromptMedia(items=items, template_token_ids=template_token_ids)
        give_up_s = min(self.ends_s, service.clock() + service.wait_s)
        expanded = await service.expander.expand(model, media, give_up_s)
        media.spans.extend(expanded.spans)
        return ExpandedMedia(list(expanded.prompt_token_ids), media)

    def _known(self, part: MediaPart) -> request_pb2.Media:
        found = self.service.named.find(self._name(part))
        if found is None:
            raise bad_request(
                f"The {part.modality} `{(part.uuid or '')[:200]}` is not known here, or no longer: send it once more, "
                "with its `uuid`.",
                part.param,
                "media_unknown",
            )
        return found

    def _keep_named(self, parts: Sequence[MediaPart], items: Sequence[request_pb2.Media]) -> None:
        for part, media in zip(parts, items, strict=True):
            if part.uuid is not None:
                self.service.named.keep(self._name(part), media)
        self.service.metrics.named_media_bytes.set(self.service.named.size_bytes)

    def _name(self, part: MediaPart) -> MediaName:
        return MediaName(self.tenant, part.modality, part.uuid or "")

    def _hold(self, size_bytes: int) -> None:
        self.service.hold(size_bytes)
        self.held_bytes += size_bytes


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """What a client is told, if anything here is for it."""
    told, _ = errors.split(ApiError)
    error: BaseException = told or errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
