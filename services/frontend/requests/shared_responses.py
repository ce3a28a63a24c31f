"""Responses that clients go on with at any frontend of the mesh.

A client does not choose the frontend that its next request comes to, so each frontend asks the others for a response
that it has not itself, and keeps what it gets. One copy goes to another frontend when a response is given, so that the
loss of a frontend loses none. The state store was the other choice: it holds intent and membership, and conversations
of megabytes, written once per request, would make it the mesh's bottleneck; an id that names its frontend would say
whom to ask and be lost with it.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

import grpc
from xxhash import xxh3_64_intdigest

from mesh.membership import Member
from mesh.tasks import TaskSet
from penstock.v1 import frontend_pb2
from services.frontend.errors import unavailable
from services.frontend.metrics import FrontendMetrics
from services.frontend.requests.frontend_peers import PEER_DEADLINE_S, FrontendPeers
from services.frontend.requests.response_store import ResponseStore, StoredResponse

log = logging.getLogger(__name__)

MAX_COPYING: Final = 256
"""Copies under way; beyond it a response has none."""


class Located(NamedTuple):
    """A response, and who has it."""

    response: StoredResponse
    peer: Member | None
    """None: this frontend."""


class SharedResponses:
    """This frontend's own and copies of others', within one bound."""

    def __init__(self, max_bytes: int, peers: FrontendPeers, metrics: FrontendMetrics) -> None:
        self.store = ResponseStore(max_bytes)
        self._max_bytes = max_bytes
        self._frontends = peers
        self._metrics = metrics
        self._tasks = TaskSet("responses")

    def keep(self, response_id: str, response: StoredResponse, *, first: Member | None = None) -> None:
        """One that was given here; a copy of it goes to another frontend, to `first` if that is still there."""
        self.store.keep(response_id, response)
        peers = sorted(self.peers(response_id), key=lambda peer: peer != first)
        if not peers or response.size_bytes > self._max_bytes:
            return
        if len(self._tasks) >= MAX_COPYING:
            self._metrics.uncopied_responses.inc()
            return
        self._tasks.spawn(self._copy(response_id, response, peers), name=f"copy {response_id}")

    def keep_copy(self, message: frontend_pb2.StoredResponse) -> None:
        """One that another frontend has given. Raises ValueError for what none sends."""
        self.store.keep(message.response_id, StoredResponse.from_message(message))

    async def find(self, response_id: str, owner: str) -> StoredResponse | None:
        """See `locate`."""
        found = await self.locate(response_id, owner)
        return None if found is None else found.response

    async def locate(self, response_id: str, owner: str) -> Located | None:
        """Here or at another frontend, which may still be making it. Raises ApiError (503) where nobody has it and not
        all could be asked."""
        found = self.store.find(response_id, owner)
        if found is not None:
            return Located(found, None)
        peers = self.peers(response_id)
        request = frontend_pb2.FindResponseRequest(response_id=response_id, owner=owner, with_running=True)
        asked = [self._frontends.stub(peer).FindResponse(request, timeout=PEER_DEADLINE_S) for peer in peers]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        having = [
            Located(StoredResponse.from_message(answer.response), peer)
            for peer, answer in zip(peers, answers, strict=True)
            if isinstance(answer, frontend_pb2.FindResponseResponse) and answer.HasField("response")
        ]
        for each in having:
            if not each.response.is_running:
                self.store.keep(response_id, each.response)
                return each
        if not having:
            self._check(answers, peers)
        return having[0] if having else None

    async def drop(self, response_id: str, owner: str) -> bool:
        """Everywhere; whether there was one of this owner's. Raises ApiError (503) where not all could be asked."""
        was_here = self.store.drop(response_id, owner)
        peers = self.peers(response_id)
        request = frontend_pb2.DropResponseRequest(response_id=response_id, owner=owner)
        asked = [self._frontends.stub(peer).DropResponse(request, timeout=PEER_DEADLINE_S) for peer in peers]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        self._check(answers, peers)
        return was_here or any(
            isinstance(answer, frontend_pb2.DropResponseResponse) and answer.was_there for answer in answers
        )

    async def copied(self) -> None:
        """Return once nothing is being copied."""
        await self._tasks.ended()

    async def stop(self) -> None:
        """Give up what is being copied."""
        await self._tasks.cancel()

    async def _copy(self, response_id: str, response: StoredResponse, peers: Sequence[Member]) -> None:
        """To the first of them that takes it."""
        request = frontend_pb2.KeepResponseRequest(response=response.to_message(response_id))
        for peer in peers:
            try:
                await self._frontends.stub(peer).KeepResponse(request, timeout=PEER_DEADLINE_S)
                return
            except grpc.aio.AioRpcError as error:
                extra = {"response_id": response_id, "frontend": peer.member_id, "error": error.details()}
                log.warning("a frontend does not take a copy of a response", extra=extra)
        self._metrics.uncopied_responses.inc()

    def _check(self, answers: Sequence[object], peers: Sequence[Member]) -> None:
        silent = [
            peer.member_id for peer, answer in zip(peers, answers, strict=True) if isinstance(answer, BaseException)
        ]
        if silent:
            log.warning("frontends could not be asked for a response", extra={"frontends": silent})
            raise unavailable(f"The frontends {', '.join(silent)} could not be asked for the response; try again.")

    def peers(self, response_id: str) -> list[Member]:
        """In an order of each response's own, so that copies are spread evenly and whoever looks for one finds it soon
        (rendezvous hashing)."""
        members = self._frontends.members()
        return sorted(members, key=lambda member: xxh3_64_intdigest(f"{response_id}/{member.member_id}".encode()))
