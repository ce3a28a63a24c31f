"""The KV transfer agents of an instance whose model is spread over ranks, seen from its engine core.

Each rank is a process of vLLM's with an agent of its own (`rank_bridge`). The core alone decides and counts: what is
published is told to nobody before every rank serves it, a load has come when every rank has its part, and one that
failed ends the others'.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import msgspec
import zmq.asyncio
from zmq.constants import SocketOption, SocketType

import mesh.errors
from engine_worker.engines.vllm.connector.endpoint import UNIX
from engine_worker.engines.vllm.connector.rank_messages import (
    FromRank,
    HoldReady,
    LoadReady,
    RankAnswer,
    RankAskStatus,
    RankCall,
    RankCancel,
    RankCapture,
    RankCapturing,
    RankCommand,
    RankEvent,
    RankExport,
    RankHello,
    RankPull,
    RankPulled,
    RankStates,
    RankStatus,
    RankWithdraw,
    ToRank,
    Unstaged,
)
from engine_worker.kv.connection import PeerAddress
from engine_worker.kv.transfer import AgentDescription, AgentStatus, TransferStats
from mesh.errors import EngineFailed, KvTransferRefused, PenstockError

log = logging.getLogger(__name__)

RANKS_SUFFIX = "-ranks"
"""Of the endpoint at which an engine core waits for its ranks, behind that of its worker."""
CANCELLED = "Cancelled"
"""The error of a rank's command that was cancelled."""
_STATUS_S = 2.0
_LATE_S = 5.0
"""What a rank may take beyond a pull's deadline before it is called late."""

_UNKNOWN = AgentStatus(0, 0, 0, 0, 0, (), 0, 0, 0, 0, 0.0)


@dataclass(slots=True)
class _Call:
    answers: dict[int, RankAnswer] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def has_failed(self) -> bool:
        return any(answer.error for answer in self.answers.values())


class RankAgents:
    """The agents of all ranks as if they were one. On one event loop."""

    def __init__(
        self,
        endpoint: str,
        ranks: int,
        on_all: Callable[[RankEvent], None],
        on_states: Callable[[bytes], None] = lambda content: None,
    ) -> None:
        """`on_all` is called once every rank has said the same, `on_states` with hidden states of a step."""
        self._ranks = ranks
        self._on_all = on_all
        self._on_states = on_states
        self._endpoint = endpoint + RANKS_SUFFIX
        self._socket: Any = None
        self._identities: dict[int, bytes] = {}
        self._hellos: dict[int, AgentDescription] = {}
        self._are_here = asyncio.Event()
        self._numbers = count(1)
        self._calls: dict[int, _Call] = {}
        self._statuses: dict[int, AgentStatus] = {}
        self._said: dict[tuple[type[RankEvent], str], set[int]] = {}
        self._listening: asyncio.Task[None] | None = None

    async def start(self, timeout_s: float) -> None:
        """Wait for all ranks. Raises `EngineFailed`."""
        self._socket = zmq.asyncio.Context.instance().socket(SocketType.ROUTER)
        self._socket.setsockopt(SocketOption.LINGER, 0)
        self._socket.bind(self._endpoint)
        if self._endpoint.startswith(UNIX):
            os.chmod(self._endpoint.removeprefix(UNIX), 0o600)
        self._listening = asyncio.create_task(self._listen(), name="ranks")
        try:
            async with asyncio.timeout(timeout_s):
                await self._are_here.wait()
        except TimeoutError as error:
            here = ", ".join(map(str, sorted(self._hellos))) or "none"
            raise EngineFailed(
                f"of {self._ranks} ranks these have a KV transfer agent after {timeout_s:g} s: {here}"
            ) from error

    async def stop(self) -> None:
        """Listen no more; the ranks stop their agents themselves."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
            self._socket.close()

    async def describe(self) -> AgentDescription:
        """All ranks together: the port of each, and the bytes of a block in all of them."""
        first, *others = [self._hellos[rank] for rank in range(self._ranks)]
        region_block_bytes = tuple(size for each in (first, *others) for size in each.layout.region_block_bytes)
        return AgentDescription(
            first.agent_id,
            first.port,
            msgspec.structs.replace(first.layout, region_block_bytes=region_block_bytes, regions=(), ranks=self._ranks),
            first.settings,
            tuple(each.port for each in others),
        )

    async def status(self) -> AgentStatus:
        """Of all ranks together. One that does not answer soon is an obstacle, with what it said last."""
        number, call = self._begin(RankAskStatus())
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_STATUS_S):
                    while len(call.answers) < self._ranks:
                        call.changed.clear()
                        await call.changed.wait()
        finally:
            del self._calls[number]
        for rank in range(self._ranks):
            answer = call.answers.get(rank)
            if answer is not None and isinstance(answer.value, RankStatus):
                self._statuses[rank] = answer.value.agent
            else:
                self._statuses[rank] = replace(
                    self._statuses.get(rank, _UNKNOWN), obstacle="its KV transfer agent does not answer"
                )
        return _together([self._statuses[rank] for rank in range(self._ranks)])

    async def share(self, export_id: str, block_ids: Sequence[int], kv_token: str) -> None:
        """Let whoever has the token read these blocks; when it returns, every rank serves them."""
        await self._ask(RankExport(export_id, tuple(block_ids), kv_token))

    async def withdraw(self, export_id: str) -> None:
        """End an export. When it returns no peer reads its blocks any more, at any rank."""
        await self._ask(RankWithdraw(export_id))

    async def pull(
        self,
        peer: PeerAddress,
        transfer_id: str,
        source_block_ids: Sequence[int],
        target_block_ids: Sequence[int],
        deadline_s: float,
    ) -> TransferStats:
        """See `KvTransferAgent.pull`: each rank pulls its part. Raises what the first rank raised that failed, once all
        are at rest."""
        command = RankPull(peer.with_token, transfer_id, tuple(source_block_ids), tuple(target_block_ids), deadline_s)
        number, call = self._begin(command)
        late = asyncio.get_running_loop().call_later(
            deadline_s + _LATE_S, lambda: log.error("a rank does not end its pull", extra={"rank": self._silent(call)})
        )
        try:
            answers = await self._end(number, call)
        finally:
            late.cancel()
        return _all_parts([answer.value.stats for answer in answers if isinstance(answer.value, RankPulled)])

    async def pull_reserved(
        self,
        peer: PeerAddress,
        transfer_id: str,
        source_block_ids: Sequence[int],
        target_block_ids: Sequence[int],
        deadline_s: float,
    ) -> TransferStats:
        """Always `KvTransferRefused`: vLLM's engines reserve nothing for pulls that are ordered from outside."""
        raise KvTransferRefused(f"nothing is reserved under {transfer_id!r}")

    async def capture(self, every_steps: int) -> str:
        """See `Capture`: the rank that has whole hidden states sends them. Returns the first obstacle."""
        answers = await self._end(*self._begin(RankCapture(every_steps)))
        obstacles = [answer.value.obstacle for answer in answers if isinstance(answer.value, RankCapturing)]
        return next((f"rank {rank}: {obstacle}" for rank, obstacle in enumerate(obstacles) if obstacle), "")

    async def _ask(self, command: RankCommand) -> None:
        await self._end(*self._begin(command))

    def _begin(self, command: RankCommand) -> tuple[int, _Call]:
        number, call = next(self._numbers), _Call()
        self._calls[number] = call
        for rank in range(self._ranks):
            self._send(rank, RankCall(number, command))
        return number, call

    async def _end(self, number: int, call: _Call) -> list[RankAnswer]:
        """When all ranks have answered, cancelled or not: only then is nothing written any more. A rank that failed, or
        the caller who wants no more, ends the others'."""
        is_cancelled = told = False
        try:
            while len(call.answers) < self._ranks:
                call.changed.clear()
                try:
                    await call.changed.wait()
                except asyncio.CancelledError:
                    is_cancelled = True
                if (is_cancelled or call.has_failed) and not told:
                    told = True
                    for rank in self._unanswered(call):
                        self._send(rank, RankCancel(number))
        finally:
            del self._calls[number]
        if is_cancelled:
            raise asyncio.CancelledError
        answers = [call.answers[rank] for rank in range(self._ranks)]
        failed = sorted((each for each in answers if each.error), key=lambda each: each.error == CANCELLED)
        if failed:
            raise _error_of(failed[0])
        return answers

    def _send(self, rank: int, message: ToRank) -> None:
        # A future of pyzmq's, which keeps the order of its own accord; a rank that is gone ends the engine.
        self._socket.send_multipart([self._identities[rank], msgspec.msgpack.encode(message)])

    async def _listen(self) -> None:
        decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
        while True:
            identity, frame = await self._socket.recv_multipart()
            self._take(identity, decoder.decode(frame))

    def _take(self, identity: bytes, message: FromRank) -> None:
        match message:
            case RankHello(rank, agent):
                self._identities[rank], self._hellos[rank] = identity, agent
                if len(self._hellos) == self._ranks:
                    self._are_here.set()
            case RankAnswer(rank, number):
                if (call := self._calls.get(number)) is not None:
                    call.answers[rank] = message
                    call.changed.set()
            case LoadReady(rank, order):
                self._count(rank, message, order.carrier_id)
            case HoldReady(rank, hold_id):
                self._count(rank, message, hold_id)
            case RankStates(_, content):
                self._on_states(content)
            case Unstaged(rank, migration_id):
                self._count(rank, message, migration_id)

    def _count(self, rank: int, event: RankEvent, about: str) -> None:
        said = self._said.setdefault((type(event), about), set())
        said.add(rank)
        if len(said) == self._ranks:
            del self._said[type(event), about]
            self._on_all(event)

    def _unanswered(self, call: _Call) -> list[int]:
        return [rank for rank in range(self._ranks) if rank not in call.answers]

    def _silent(self, call: _Call) -> str:
        return "rank " + ", ".join(map(str, self._unanswered(call)))


def _error_of(answer: RankAnswer) -> PenstockError:
    kind = getattr(mesh.errors, answer.error, EngineFailed)
    error: PenstockError = kind(f"rank {answer.rank}: {answer.message}")
    return error


def _together(each: Sequence[AgentStatus]) -> AgentStatus:
    """Blocks and transfers are the same at all ranks; bytes are not, and what hinders one hinders all."""
    first, *others = each
    obstacles = [f"rank {rank}: {status.obstacle}" for rank, status in enumerate(each) if status.obstacle]
    return AgentStatus(
        pulling=max(status.pulling for status in each),
        pull_queue=max(status.pull_queue for status in each),
        serving=max(status.serving for status in each),
        serve_queue=max(status.serve_queue for status in each),
        connections=sum(status.connections for status in each),
        exports=first.exports,
        exported_blocks=first.exported_blocks,
        pulls_total=min(status.pulls_total for status in each),
        failed_pulls_total=max(status.failed_pulls_total for status in each),
        pulled_bytes_total=sum(status.pulled_bytes_total for status in each),
        pull_seconds_total=max(status.pull_seconds_total for status in each),
        port=first.port,
        obstacle="; ".join(obstacles),
        reopened_total=sum(status.reopened_total for status in each),
        rejected_total=sum(status.rejected_total for status in each),
        more_ports=tuple(status.port for status in others),
        ranks=tuple(status.of_rank(0, rank) for rank, status in enumerate(each)),
    )


def _all_parts(each: Sequence[TransferStats]) -> TransferStats:
    return TransferStats(
        each[0].transfer_id,
        each[0].blocks,
        sum(stats.nbytes for stats in each),
        sum(stats.messages for stats in each),
        max(stats.waited_s for stats in each),
        max(stats.duration_s for stats in each),
    )
