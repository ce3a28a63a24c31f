"""The KV transfer agent: one per engine process, beside the KV memory.

    agent = KvTransferAgent(memory, KvTransferSettings(), SystemClock(), SystemEntropy(), agent_id="worker-1")
    port = await agent.start()

All methods are to be called on the event loop that `start` was awaited on.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import Any

from engine_worker.kv.connection import Connection, PeerAddress
from engine_worker.kv.fabric import KvEndpoint, KvFabric, KvListener
from engine_worker.kv.grants import BlockGrants
from engine_worker.kv.memory import KvMemory
from engine_worker.kv.messages import MAX_ID_CHARACTERS, MAX_PARTS, MAX_RUNS, PROTOCOL_VERSION, Hello, Pull
from engine_worker.kv.orders import PullOrders
from engine_worker.kv.plan import Run, check_block_ids, joint_runs
from engine_worker.kv.regions import plan_sources, whole
from engine_worker.kv.serving import ServedPull, request_refusal
from engine_worker.kv.session import PulledShare, Session, at_rest
from engine_worker.kv.settings import KvTransferSettings
from engine_worker.kv.slots import TransferSlots
from engine_worker.kv.staging import StagingRing
from engine_worker.kv.tokens import ExportTokens
from engine_worker.kv.transfer import AgentDescription, AgentStatus, TransferStats
from engine_worker.kv.ucx_worker import ucx_fabric
from mesh.backoff import Backoff
from mesh.errors import ConfigurationError, DeadlineExceeded, KvTransferRefused, PenstockError, ProtocolViolation
from mesh.runtime import Clock, Entropy

log = logging.getLogger(__name__)

DOUBT_S = 0.1
LONGEST_PAUSE_S = 30.0
"""Between two attempts to open an agent anew."""


class KvTransferAgent:
    """Pulls blocks from other agents and serves blocks that were exported here. `reserve`, `release` and
    `pull_reserved` go to its `PullOrders`."""

    def __init__(
        self,
        memory: KvMemory,
        settings: KvTransferSettings,
        clock: Clock,
        entropy: Entropy,
        *,
        agent_id: str,
        make_fabric: Callable[[KvTransferSettings], KvFabric] = ucx_fabric,
    ) -> None:
        """`make_fabric` is called by `start`. Raises `ConfigurationError` if a block does not fit into a message."""
        largest = max(memory.layout.region_block_bytes)
        if largest > settings.message_bytes:
            raise ConfigurationError(
                f"a block has {largest} bytes in one region and a message at most {settings.message_bytes}: raise "
                "message_bytes, on all workers alike"
            )
        self._memory = memory
        self._settings = settings
        self._clock = clock
        self._agent_id = agent_id
        self._make_fabric = make_fabric
        self._entropy = entropy
        self._exports = BlockGrants("exported")
        self._tokens = ExportTokens(entropy)
        self.orders = PullOrders(self.pull)
        """For pulls that another process of this worker orders."""
        self._pull_slots = self._new_slots()
        self._serve_slots = self._new_slots()
        self._sessions: dict[PeerAddress, asyncio.Task[Session]] = {}
        """Those that this side opened; pulls use them. Those of peers that pull from here are in `_open` only."""
        self._open: dict[Connection, Session | None] = {}
        """None while the two greet each other."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._fabric: KvFabric | None = None
        self._listener: KvListener | None = None
        self._port = 0
        self._is_stopping = False
        self._obstacle = ""
        self._reopened = 0
        self._rejected = 0
        self._doubt = asyncio.Event()
        """A peer could not be reached or was lost: look whether that is our fault, or has done us harm."""
        self._watching: asyncio.Task[None] | None = None
        self._pulls = 0
        self._failed_pulls = 0
        self._pulled_bytes = 0
        self._pull_s = 0.0

    async def start(self) -> int:
        """Make the fabric and listen. Returns the port. Raises `ConfigurationError` where UCX is not installed or the
        port is taken."""
        self._fabric = self._make_fabric(self._settings)
        self._listen(self._settings.port)
        self._watching = asyncio.create_task(self._watch(), name="kv watch")
        self._watching.add_done_callback(self._task_ended)
        return self.port

    @property
    def port(self) -> int:
        """Where peers connect; after `start`. It stays the same when the agent is opened anew, if it can be had."""
        if not self._port:
            raise ConfigurationError("the KV transfer agent is not started")
        return self._port

    async def describe(self) -> AgentDescription:
        """The agent's identity, port and KV layout. Call after `start`."""
        return AgentDescription(self._agent_id, self.port, self._memory.layout, self._settings)

    def export(self, export_id: str, block_ids: Sequence[int], token: str) -> None:
        """Let whoever has the token read these blocks under this id, besides those exported under it before. They must
        hold what they are to hold, and keep it, until `withdraw` has returned. Raises `KvTransferRefused`."""
        if len(export_id) > MAX_ID_CHARACTERS:
            raise KvTransferRefused(f"an export's id has at most {MAX_ID_CHARACTERS} characters")
        self._check_range(block_ids)
        self._tokens.open(export_id, token)
        self._exports.open(export_id, block_ids)

    async def withdraw(self, export_id: str) -> None:
        """End an export. When this returns or raises, no transfer reads its blocks any more; transfers under way
        are failed, in `grace_s` at most."""
        withdrawing = asyncio.create_task(self._withdraw(export_id))
        try:
            await asyncio.shield(withdrawing)
        except asyncio.CancelledError:
            await at_rest(withdrawing)
            raise

    async def pull(
        self,
        peer: PeerAddress,
        transfer_id: str,
        source_block_ids: Sequence[int],
        target_block_ids: Sequence[int],
        deadline_s: float,
    ) -> TransferStats:
        """Fill target_block_ids[i] with the peer's source_block_ids[i], which it has exported as `transfer_id` for
        whoever has the token of the address.

        However it ends, cancelled too, no target block is written to afterwards; after an error they may hold
        anything. Ends at most `grace_s` after the deadline. Raises KvTransferRefused (not exported, no token of it,
        other layout, too many waiting, a layer or head that no rank of the peer has), KvTransferFailed (the source
        gave up), PeerUnavailable, DeadlineExceeded, KvBlockCorrupt (checksums), or what the engine's memory raised.
        """
        check_block_ids(source_block_ids, target_block_ids, self._memory.blocks)
        began_s = self._clock.now_s()
        try:
            async with asyncio.timeout(deadline_s):
                stats = await self._pull(
                    peer, transfer_id, joint_runs(source_block_ids, target_block_ids), began_s, deadline_s
                )
        except TimeoutError as error:
            self._failed_pulls += 1
            raise DeadlineExceeded(
                f"{len(target_block_ids)} blocks of {transfer_id!r} did not arrive from {peer} within "
                f"{deadline_s:g} s; the peer may be hung, cut off or overloaded"
            ) from error
        except BaseException:
            self._failed_pulls += 1
            raise
        self._pulls += 1
        self._pulled_bytes += stats.nbytes
        self._pull_s += stats.duration_s
        return stats

    async def pull_reserved(
        self,
        peer: PeerAddress,
        transfer_id: str,
        source_block_ids: Sequence[int],
        target_block_ids: Sequence[int],
        deadline_s: float,
    ) -> TransferStats:
        """Pull into blocks that the engine has reserved under `transfer_id`. Raises as `pull`, and `KvTransferRefused`
        for blocks that are not reserved."""
        return await self.orders.pull(peer, transfer_id, source_block_ids, target_block_ids, deadline_s)

    @property
    def exported(self) -> tuple[str, ...]:
        """Transfers that peers may read blocks for."""
        return self._exports.ids

    async def status(self) -> AgentStatus:
        """Transfers that run and wait now, and totals since the start."""
        return AgentStatus(
            pulling=self._pull_slots.running,
            pull_queue=self._pull_slots.queued,
            serving=self._serve_slots.running,
            serve_queue=self._serve_slots.queued,
            connections=len(self._open),
            exports=self._exports.ids,
            exported_blocks=self._exports.blocks,
            pulls_total=self._pulls,
            failed_pulls_total=self._failed_pulls,
            pulled_bytes_total=self._pulled_bytes,
            pull_seconds_total=self._pull_s,
            port=self._port,
            obstacle=self._obstacle,
            reopened_total=self._reopened,
            rejected_total=self._rejected,
        )

    async def stop(self) -> None:
        """Fail all transfers and close everything."""
        self._is_stopping = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait((self._watching,))
        await self._close_fabric("the agent stops")

    def _listen(self, port: int) -> None:
        assert self._fabric is not None, "it has just been made"
        self._listener = self._fabric.listen(port, self._accept)
        self._port = self._listener.port

    async def _close_fabric(self, reason: str) -> None:
        fabric, self._fabric, self._listener = self._fabric, None, None
        for connection in tuple(self._open):
            connection.cut(reason)
        waiting = [*self._tasks, *self._sessions.values()]
        if waiting:
            await asyncio.wait(waiting)
        if fabric is not None:
            await fabric.close()

    async def _watch(self) -> None:
        """Look at the fabric every `probe_s`, and in doubt at once; open it anew where that helps, after pauses that
        double while it fails."""
        probe_s = self._settings.probe_s
        doubted_s = -inf
        backoff = Backoff(2 * probe_s, max(2 * probe_s, LONGEST_PAUSE_S))
        pause_s = probe_s
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._doubt.wait()
            if in_doubt := self._doubt.is_set():
                # Peers that are gone are doubted with each request for them: once in a while is enough.
                wait_s = doubted_s + probe_s - self._clock.now_s()
                await self._clock.sleep(max(min(DOUBT_S, probe_s), wait_s))
                self._doubt.clear()
                doubted_s = self._clock.now_s()
            pause_s = probe_s
            if self._fabric is not None and self._note_obstacle(self._fabric.obstacle()):
                continue
            staleness = self._fabric.staleness() if self._fabric is not None else self._obstacle
            patience_s = self._settings.reopen_s
            if in_doubt and self._fabric is not None and not staleness:
                # What peers of this machine are sending is stuck, and would be waited for in vain.
                staleness, patience_s = await self._fabric.jam(), 0.0
            if staleness and not await self._reopen(staleness, patience_s):
                pause_s = backoff.next_s()
            else:
                backoff.reset()

    def _note_obstacle(self, obstacle: str) -> bool:
        """Whether there is one that opening anew would not remove."""
        if obstacle and obstacle != self._obstacle:
            log.error("no block can be moved to or from new peers any more", extra={"reason": obstacle})
        elif self._obstacle and not obstacle:
            log.warning("blocks can be moved again")
        self._obstacle = obstacle
        return bool(obstacle)

    async def _reopen(self, staleness: str, patience_s: float) -> bool:
        """Whether the agent can be reached again. Transfers under way are given `patience_s` to end."""
        log.warning("the KV transfer agent is opened anew", extra={"reason": staleness})
        self._obstacle = f"the KV transfer agent is being opened anew: {staleness}"
        waited_s = 0.0
        while self._fabric is not None and self._is_moving and waited_s < patience_s:
            await self._clock.sleep(self._settings.probe_s)
            waited_s += self._settings.probe_s
        await self._close_fabric("the agent is opened anew")
        try:
            self._fabric = self._make_fabric(self._settings)
            try:
                self._listen(self._port)
            except ConfigurationError as error:
                log.warning("the KV transfer agent takes another port", extra={"reason": str(error)})
                self._listen(0)
        except Exception as error:  # noqa: BLE001  UCX raises what it likes; all of it means that no block moves
            await self._close_fabric("the agent could not be opened anew")
            self._obstacle = f"the KV transfer agent cannot be opened anew: {error}"
            log.error("the KV transfer agent cannot be opened anew; no block moves", extra={"reason": str(error)})
            return False
        self._reopened += 1
        self._obstacle = ""
        log.warning("the KV transfer agent was opened anew", extra={"port": self._port, "times": self._reopened})
        return True

    @property
    def _is_moving(self) -> bool:
        return bool(self._pull_slots.running or self._serve_slots.running)

    async def _pull(
        self, peer: PeerAddress, transfer_id: str, runs: list[Run], began_s: float, deadline_s: float
    ) -> TransferStats:
        messages = 0
        async with self._pull_slots.take() as ring:
            sessions = await asyncio.gather(*(self._session(rank, transfer_id) for rank in peer.ranks))
            waited_s = self._clock.now_s() - began_s
            # One rank of the peer after the other: two at once would need twice the staging memory for one network.
            for session, share in self._shares(sessions):
                for first in range(0, len(runs), MAX_RUNS):
                    left_s = deadline_s - (self._clock.now_s() - began_s)
                    messages += await session.pull(
                        transfer_id, peer.token, runs[first : first + MAX_RUNS], ring, left_s, share
                    )
        blocks = sum(run.blocks for run in runs)
        nbytes = blocks * self._memory.layout.block_bytes
        return TransferStats(transfer_id, blocks, nbytes, messages, waited_s, self._clock.now_s() - began_s)

    def _shares(self, sessions: Sequence[Session]) -> list[tuple[Session, PulledShare]]:
        """What each of a peer's ranks gives. Raises `KvTransferRefused` where they have not all that is wanted."""
        layouts = []
        for rank, connection in enumerate(session.connection for session in sessions):
            if connection.refusal:
                raise KvTransferRefused(f"{connection.peer_name} has another KV layout: {connection.refusal}")
            layouts.append(connection.peer_layout)
            if (layouts[-1].rank, layouts[-1].ranks) != (rank, len(sessions)):
                raise KvTransferRefused(
                    f"{connection.peer_name} is rank {layouts[-1].rank} of {layouts[-1].ranks}, and was taken for rank "
                    f"{rank} of {len(sessions)}: was it started anew?"
                )
        ours = self._memory.layout
        # Several ranks make one load, and what one of them got wrong would stay in the prefix cache.
        is_verified = self._settings.device == "cpu" and max(len(sessions), ours.ranks) > 1
        shares = []
        for source in plan_sources(ours, layouts):
            is_whole = not source.ours or (source.ours == whole(ours) and source.theirs == whole(layouts[source.rank]))
            memory = self._memory if is_whole else self._memory.part(source.ours)
            share = PulledShare(() if is_whole else source.theirs, memory, is_verified)
            if len(share.parts) > MAX_PARTS:
                raise KvTransferRefused(
                    f"{len(share.parts)} parts of blocks are needed, and {MAX_PARTS} may be asked for"
                )
            shares.append((sessions[source.rank], share))
        return shares

    async def _session(self, peer: PeerAddress, transfer_id: str) -> Session:
        """The session that pulls from a peer use, opened for this one if there is none."""
        while (opening := self._sessions.get(peer)) is not None:
            # Others wait for the same attempt, and it is bounded by itself. What opens nothing for another transfer may
            # open it for this one.
            with suppress(KvTransferRefused):
                return await asyncio.shield(opening)
            await asyncio.sleep(0)  # until it is forgotten
        if self._is_stopping or self._fabric is None:
            raise KvTransferRefused(self._obstacle or "this KV transfer agent is not running")
        if len(self._open) >= self._settings.max_connections:
            raise KvTransferRefused(f"this agent has {len(self._open)} connections, as many as it may")
        opening = asyncio.create_task(self._dial(self._fabric, peer, transfer_id), name=f"kv dial {peer}")
        self._sessions[peer] = opening
        opening.add_done_callback(lambda done: self._forget_if_failed(peer, done))
        return await asyncio.shield(opening)

    async def _dial(self, fabric: KvFabric, peer: PeerAddress, transfer_id: str) -> Session:
        endpoint = await fabric.connect(peer.host, peer.port)
        if self._is_stopping:
            endpoint.close()
            raise KvTransferRefused("this KV transfer agent is stopping")
        connection = self._connection(endpoint, str(peer))
        await connection.call(transfer_id, peer.token, self._settings.connect_s)
        session = self._greeted(connection)
        session.connection.on_cut.append(lambda _: self._forget(peer))
        return session

    def _accept(self, endpoint: KvEndpoint) -> None:
        if self._is_stopping or len(self._open) >= self._settings.max_connections:
            log.warning("a KV agent's connection was refused", extra={"connections": len(self._open)})
            endpoint.close()
            return
        self._spawn(self._greet_caller(endpoint), "kv accept")

    async def _greet_caller(self, endpoint: KvEndpoint) -> None:
        connection = self._connection(endpoint, "a caller")
        try:
            await connection.answer(self._tokens, self._settings.connect_s)
            self._greeted(connection)
        except (KvTransferRefused, ProtocolViolation) as error:
            self._note_rejection(str(error))
        except PenstockError as error:
            log.warning("a KV agent connected and did not introduce itself", extra={"reason": str(error)})
            self._doubt.set()

    def _connection(self, endpoint: KvEndpoint, peer_name: str) -> Connection:
        """One that is counted until it is cut."""
        hello = Hello(PROTOCOL_VERSION, self._agent_id, self._memory.layout)
        connection = Connection(endpoint, hello, peer_name, self._entropy)
        self._open[connection] = None
        connection.on_cut.append(self._closed)
        return connection

    def _greeted(self, connection: Connection) -> Session:
        if connection.is_cut:
            raise connection.lost()
        session = self._open[connection] = Session(connection, self._memory, self._settings, self._serve)
        return session

    def _note_rejection(self, reason: str) -> None:
        self._rejected += 1
        log.warning("a KV transfer was asked for without its token", extra={"reason": reason})

    def _forget_if_failed(self, peer: PeerAddress, opening: asyncio.Task[Session]) -> None:
        error = None if opening.cancelled() else opening.exception()
        if opening.cancelled() or error is not None or opening.result().connection.is_cut:
            self._forget(peer)
            if not isinstance(error, KvTransferRefused):  # whoever refuses was reached
                self._doubt.set()

    def _forget(self, peer: PeerAddress) -> None:
        self._sessions.pop(peer, None)

    def _closed(self, connection: Connection) -> None:
        if self._open.pop(connection, None) is not None:
            self._doubt.set()

    def _serve(self, session: Session, serving: ServedPull) -> None:
        reason = session.connection.refusal or self._refusal(session.connection, serving.request)
        if reason:
            serving.refuse(reason)
        else:
            self._spawn(self._serve_in_turn(session, serving), f"kv serve {serving.request.export_id}")

    async def _serve_in_turn(self, session: Session, serving: ServedPull) -> None:
        bound_s = serving.request.deadline_ms * 1e-3 + self._settings.grace_s
        reason = f"the puller did not take the blocks of {serving.request.export_id!r} within {bound_s:g} s"
        timer = asyncio.get_running_loop().call_later(bound_s, session.connection.cut, reason)
        serving.closed.add_done_callback(lambda _: timer.cancel())
        try:
            async with self._serve_slots.take() as ring:
                await serving.run(ring, self._settings.window_messages)
        except KvTransferRefused as error:
            serving.refuse(str(error))

    def _refusal(self, connection: Connection, request: Pull) -> str:
        """Why a pull is not served; empty if it is."""
        if request.export_id not in self._exports.ids:
            return self._exports.refusal(request.export_id, ())
        if not connection.is_shown(self._tokens, request.export_id, request.transfer, request.proof):
            reason = f"{connection.peer_name} has no token of {request.export_id!r}"
            self._note_rejection(reason)
            return reason
        if refusal := request_refusal(request, self._memory, self._settings.message_bytes):
            return refusal
        blocks = [block for first, count in request.runs for block in range(first, first + count)]
        return self._exports.refusal(request.export_id, blocks)

    async def _withdraw(self, export_id: str) -> None:
        self._exports.close(export_id)
        self._tokens.close(export_id)
        reading: dict[asyncio.Future[None], Connection] = {}
        for connection, session in tuple(self._open.items()):
            for serving in session.serving_of(export_id) if session else ():
                reading[serving.at_rest] = connection
                serving.fail("it was withdrawn")
        if not reading:
            return
        await asyncio.wait(reading, timeout=self._settings.grace_s)
        late = [still_read for still_read in reading if not still_read.done()]
        for still_read in late:
            reading[still_read].cut(f"the puller did not take the blocks of {export_id!r}, which was withdrawn")
        if late:
            await asyncio.wait(late)

    def _check_range(self, block_ids: Sequence[int]) -> None:
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < self._memory.blocks:
            raise KvTransferRefused(f"block ids are from 0 on and below {self._memory.blocks}")

    def _new_slots(self) -> TransferSlots:
        settings = self._settings
        return TransferSlots(
            settings.parallel_transfers,
            settings.queued_transfers,
            lambda: StagingRing(self._memory, settings.window_messages, settings.gathered_bytes),
        )

    def _spawn(self, work: Any, name: str) -> None:
        """Such tasks end by themselves, within a bound, and are never cancelled: UCX's futures must not be."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("a KV transfer task died", exc_info=error, extra={"task": task.get_name()})
