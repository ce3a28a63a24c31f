"""From the images of a conversation to the tokens of its prompt, and the memory that they take until it is answered."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from controlplane.model.media import media_hash
from mesh.runtime import Threads
from penstock.v1 import request_pb2
from services.frontend.errors import ApiError, unavailable
from services.frontend.media.expander import Expander
from services.frontend.media.fetcher import MediaFetcher, in_thread_if_large
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
    def held(self, ends_s: float) -> Iterator["MediaLoader"]:
        """What is loaded inside, for one request that ends by then, counts as held until it is left: the request may
        have to be placed again."""
        loader = MediaLoader(self, ends_s)
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
    held_bytes: int = field(default=0)

    async def expand(
        self, model: str, parts: Sequence[MediaPart], template_token_ids: Sequence[int], copies: int
    ) -> ExpandedMedia:
        """`copies`: how many answers are wanted, each of which is a request of its own to a worker. Raises ApiError."""
        service = self.service
        left_bytes = service.max_bytes // copies
        turns = asyncio.Semaphore(MAX_FETCHES)

        async def fetch(part: MediaPart) -> request_pb2.Media:
            nonlocal left_bytes
            async with turns:
                content = await service.fetcher.fetch(part.url, left_bytes, part.param)
                left_bytes -= len(content)
                if left_bytes < 0:
                    raise too_large(service.max_bytes, part.param)
                self._hold(len(content) + len(part.url))
                told = await in_thread_if_large(service.threads, len(content), media_hash, part.modality, content)
                return request_pb2.Media(modality=part.modality, content=content, media_hash=told)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(fetch(part)) for part in parts]
        except BaseExceptionGroup as errors:
            service.metrics.media_failures.inc()
            raise _first(errors) from errors
        media = request_pb2.PromptMedia(items=[task.result() for task in tasks], template_token_ids=template_token_ids)
        give_up_s = min(self.ends_s, service.clock() + service.wait_s)
        expanded = await service.expander.expand(model, media, give_up_s)
        media.spans.extend(expanded.spans)
        return ExpandedMedia(list(expanded.prompt_token_ids), media)

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
