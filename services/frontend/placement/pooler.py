"""Prompts of pooling models: placed by load in bounded batches, asked for again elsewhere when a worker fails.

A prompt has no state that would be worth moving, so whatever goes wrong is mended by asking another instance.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

import grpc
import numpy as np
from numpy.typing import NDArray

from controlplane.model.incarnation import Incarnation
from controlplane.model.pooling import MAX_POOLED_PROMPTS, PoolingTask
from controlplane.protocols.recovery import RecoveryLimits
from mesh.errors import NoInstance, UnknownModel
from mesh.rpc.client import open_channel
from mesh.runtime import Transport
from penstock.v1 import request_pb2, scheduler_pb2, worker_pb2, worker_pb2_grpc
from services.frontend.errors import bad_request, deadline_exceeded, stopped, unavailable, upstream_failed
from services.frontend.metrics import FrontendMetrics
from services.frontend.placement.client import PlacementClient
from services.frontend.placement.waiting_room import WaitingRoom
from services.frontend.workers.link import WorkerLink
from services.frontend.workers.pool import WorkerPool

log = logging.getLogger(__name__)

MAX_BATCH_TOKENS: Final = 16384
"""Of one call of a worker: a batch is to take no longer than other requests do."""
MAX_CALLS: Final = 8
"""Of one client request at once."""
RETRY_PAUSE_S: Final = 0.1
LOOK_AGAIN_S: Final = 1.0
"""While no instance takes a request, if nothing is heard before."""

Vectors = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PoolingRequest:
    """What a client wants of its prompts."""

    request_id: str
    model: str
    ends_s: float
    """Its deadline."""
    deadline_s: float
    """The same, from its arrival."""
    prompts: Sequence[Sequence[int]]
    task: PoolingTask
    dimensions: int | None = None
    use_activation: bool | None = None
    priority: int = 0
    cache_salt: str = ""
    first_segments: Sequence[int] = ()
    """Of each prompt, so many tokens are of the first text of a pair; empty: the model is not told."""


@dataclass(slots=True)
class _Connection:
    """To one life of a worker."""

    channel: grpc.aio.Channel
    calls: int = 0
    """Under way."""


def batches(prompts: Sequence[Sequence[int]], *, by_token: bool) -> list[range]:
    """Indices of the prompts of each call, in order. `by_token`: the results are as long as the prompts, so each prompt
    is a call of its own."""
    if by_token:
        return [range(index, index + 1) for index in range(len(prompts))]
    found: list[range] = []
    first = tokens = 0
    for index, prompt in enumerate(prompts):
        full = index - first >= MAX_POOLED_PROMPTS or tokens + len(prompt) > MAX_BATCH_TOKENS
        if full and index > first:
            found.append(range(first, index))
            first, tokens = index, 0
        tokens += len(prompt)
    return [*found, range(first, len(prompts))] if len(prompts) > first else found


@dataclass(slots=True)
class Pooler:
    """Of one frontend; `stop` closes its connections."""

    pool: WorkerPool
    placement: PlacementClient
    limits: RecoveryLimits
    connect_wait_s: float
    room: WaitingRoom
    metrics: FrontendMetrics
    transport: Transport
    clock: Callable[[], float]
    _connections: dict[Incarnation, _Connection] = field(default_factory=dict)
    """To workers that have been asked, at most as many as there are in the mesh."""

    async def results(self, request: PoolingRequest) -> list[Vectors]:
        """For each prompt, in order: rows, one or one for each of its tokens. Raises ApiError."""
        calls = batches(request.prompts, by_token=request.task.startswith("token_"))
        found: list[Vectors | None] = [None] * len(request.prompts)
        turns = asyncio.Semaphore(MAX_CALLS)

        async def ask(number: int, indices: range) -> None:
            async with turns:
                for index, vectors in zip(indices, await self._ask(request, number, indices), strict=True):
                    found[index] = vectors

        try:
            async with asyncio.TaskGroup() as group:
                for number, indices in enumerate(calls):
                    group.create_task(ask(number, indices))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        return [vectors for vectors in found if vectors is not None]

    async def stop(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            await connection.channel.close()
        self._connections.clear()

    async def _ask(self, request: PoolingRequest, number: int, indices: range) -> list[Vectors]:
        """One batch, from whoever has it. Raises ApiError."""
        give_up_s = min(self.clock() + self.limits.wait_s, request.ends_s)
        place = scheduler_pb2.PlaceRequest(
            request_id=f"{request.request_id}-{number}",
            model=request.model,
            prompt_tokens=sum(len(request.prompts[index]) for index in indices),
            priority=request.priority,
            max_tokens=1,
        )
        message = worker_pb2.PoolRequest(
            request_id=place.request_id,
            model=request.model,
            prompts=[request_pb2.TokenIds(token_ids=request.prompts[index]) for index in indices],
            task=request.task,
            dimensions=request.dimensions,
            use_activation=request.use_activation,
            priority=request.priority,
            cache_salt=request.cache_salt,
            first_segment_tokens=[request.first_segments[index] for index in indices] if request.first_segments else (),
        )
        losses = 0
        while True:
            link = await self._place(place, give_up_s)
            ok, reason = False, "aborted"
            try:
                vectors = await self._call(link, message, max(0.001, request.ends_s - self.clock()))
                ok, reason = True, "finished"
                return vectors
            except grpc.aio.AioRpcError as error:
                reason = error.code().name
                failure = error
            finally:
                self.placement.ended(place.request_id, ok, reason)
            self._check(failure, request)
            losses += 1
            extra = {"request_id": place.request_id, "instance_id": link.instance_id, "reason": failure.details()}
            if losses > self.limits.max_losses and self.clock() >= give_up_s:
                log.error("a pooling request was lost too often", extra=extra)
                raise upstream_failed(f"The workers that had the request failed: {failure.details()}", "worker_lost")
            log.warning("asking another instance for a pooling request", extra=extra)
            self.metrics.recoveries.labels("pooling").inc()
            place.excluded_instance_ids.append(link.instance_id)
            give_up_s = min(self.clock() + self.limits.wait_s, request.ends_s)
            await asyncio.sleep(RETRY_PAUSE_S)

    async def _place(self, place: scheduler_pb2.PlaceRequest, give_up_s: float) -> WorkerLink:
        """A connected worker, waiting for one until `give_up_s`. Raises ApiError."""
        with ExitStack() as waiting:
            waits = False
            while True:
                seen = self.pool.news
                try:
                    placement = await self.placement.place(place)
                    link = await self.pool.wait_connected(placement.instance_id, self.connect_wait_s)
                    if link is not None:
                        return link
                    reason = f"{placement.instance_id} is not connected"
                    self.placement.ended(place.request_id, False, "not_connected")
                except (NoInstance, UnknownModel) as error:
                    reason = str(error)
                del place.excluded_instance_ids[:]  # whoever failed before is better than nobody
                refusal = unavailable(f"No instance can take this request now: {reason}.", "no_instance")
                left_s = give_up_s - self.clock()
                if left_s <= 0:
                    raise refusal
                if self.room.is_closed:
                    raise stopped()
                if not waits:
                    waiting.enter_context(self.room.entered(place.model, refusal))
                    waits = True
                await self.pool.wait_for_news(seen, min(LOOK_AGAIN_S, left_s))

    def _check(self, error: grpc.aio.AioRpcError, request: PoolingRequest) -> None:
        """Raises ApiError for what no other instance would answer otherwise."""
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            raise bad_request(f"{error.details()}.", "input")
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED or self.clock() >= request.ends_s:
            raise deadline_exceeded(request.deadline_s)

    async def _call(self, link: WorkerLink, message: worker_pb2.PoolRequest, deadline_s: float) -> list[Vectors]:
        """Raises grpc.aio.AioRpcError."""
        connection = self._connections.get(link.sender)
        if connection is None:
            channel = open_channel(self.transport, link.member.address, link.member.role)
            connection = self._connections[link.sender] = _Connection(channel)
        stub = worker_pb2_grpc.WorkerStub(connection.channel)  # type: ignore[no-untyped-call]
        connection.calls += 1
        try:
            return _vectors(await stub.Pool(message, timeout=deadline_s))
        finally:
            connection.calls -= 1
            await self._close_departed()

    async def _close_departed(self) -> None:
        known = {link.sender for link in self.pool.links()}
        idle = [sender for sender, each in self._connections.items() if sender not in known and not each.calls]
        for sender in idle:
            await self._connections.pop(sender).channel.close()


def _vectors(response: worker_pb2.PoolResponse) -> list[Vectors]:
    """Rows of each prompt: one, or one for each of its tokens."""
    return [
        np.frombuffer(prompt.values, dtype="<f4").astype(np.float32).reshape(-1, max(1, prompt.columns))
        for prompt in response.prompts
    ]
