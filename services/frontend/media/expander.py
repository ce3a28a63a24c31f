"""Asks a worker for the tokens of a prompt with images and the like, before it is placed."""

import logging
from collections.abc import Callable
from typing import Final

import grpc
from xxhash import xxh3_64_intdigest

from mesh.rpc.client import open_channel
from mesh.runtime import Transport
from penstock.v1 import request_pb2, worker_pb2, worker_pb2_grpc
from services.frontend.errors import bad_request, unavailable
from services.frontend.workers.link import WorkerLink
from services.frontend.workers.pool import WorkerPool

log = logging.getLogger(__name__)

CALL_DEADLINE_S: Final = 30.0
LOOK_AGAIN_S: Final = 1.0


class Expander:
    """Any instance of the model can do it. Equal images go to the same one as long as it is there: it remembers what it
    made of them."""

    def __init__(self, pool: WorkerPool, transport: Transport, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._transport = transport
        self._clock = clock

    async def expand(
        self, model: str, media: request_pb2.PromptMedia, give_up_s: float
    ) -> worker_pb2.ExpandMediaResponse:
        """Until `give_up_s`. Raises ApiError: 400 for what the model cannot take, 503."""
        request = worker_pb2.ExpandMediaRequest(model=model, media=media)
        hashes = "".join(item.media_hash for item in media.items)
        reason = "no instance that takes them is connected to this frontend"
        while True:
            seen = self._pool.news
            links = [link for link in self._pool.connected(model) if link.member.attributes.get("media")]
            for link in sorted(links, key=lambda one: xxh3_64_intdigest(f"{one.instance_id}/{hashes}".encode())):
                left_s = give_up_s - self._clock()
                if left_s <= 0:
                    break
                try:
                    return await self._ask(link, request, min(left_s, CALL_DEADLINE_S))
                except grpc.aio.AioRpcError as error:
                    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                        raise bad_request(
                            f"The model cannot take this prompt: {error.details()}", "messages"
                        ) from error
                    reason = f"{link.instance_id} answered {error.code().name}: {error.details()}"
                    log.warning("asking another instance to expand a prompt", extra={"reason": reason})
            left_s = give_up_s - self._clock()
            if left_s <= 0:
                raise unavailable(f"No instance of `{model}` can read the images of this request now: {reason}.")
            await self._pool.wait_for_news(seen, min(left_s, LOOK_AGAIN_S))

    async def _ask(
        self, link: WorkerLink, request: worker_pb2.ExpandMediaRequest, timeout_s: float
    ) -> worker_pb2.ExpandMediaResponse:
        # A connection of its own: on that of the tokens, they would wait behind the images.
        async with open_channel(self._transport, link.member.address, link.member.role) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
            response: worker_pb2.ExpandMediaResponse = await stub.ExpandMedia(request, timeout=timeout_s)
            return response
