"""The KV transfer agent: one per engine process, beside the KV memory.

    agent = KvTransferAgent(memory, KvTransferSettings(), SystemClock(), agent_id="worker-1")
    port = await agent.start()

All methods are to be called on the event loop that `start` was awaited on.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from engine_worker.kv.connection import Connection, PeerAddress
from engine_worker.kv.fabric import KvEndpoint, KvFabric, KvListener
from engine_worker.kv.grants import BlockGrants
from engine_worker.kv.memory import KvMemory
from engine_worker.kv.messages import MAX_ID_CHARACTERS, MAX_RUNS, PROTOCOL_VERSION, Hello, Pull
from engine_worker.kv.orders import PullOrders
from engine_worker.kv.plan import Run, check_block_ids, joint_runs
from engine_worker.kv.serving import ServedPull
from engine_worker.kv.session import Session, at_rest
from engine_worker.kv.settings import KvTransferSettings
from engine_worker.kv.slots import TransferSlots
from engine_worker.kv.staging import StagingRing
from engine_worker.kv.transfer import AgentDescription, AgentStatus, TransferStats
from engine_worker.kv.ucx_worker import ucx_fabric
from mesh.backoff import Backoff
from mesh.errors import ConfigurationError, DeadlineExceeded, KvTransferRefused, RpcError
from mesh.runtime import Clock

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
        self._keys = count(1)
        """Of connections."""
        self._exports = BlockGrants("exported")
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
        self._doubt = asyncio.Event()
        """A peer could not be reached: look whether that is our fault."""
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

    def export(self, export_id: str, block_ids: Sequence[int]) -> None:
        """Let peers read these blocks under this id, besides those exported under it before. They must hold what
        they are to hold, and keep it, until `withdraw` has returned."""
        if len(export_id) > MAX_ID_CHARACTERS:
            raise KvTransferRefused(f"an export's id has at most {MAX_ID_CHARACTERS} characters")
        self._check_range(block_ids)
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
        """Fill target_block_ids[i] with the peer's source_block_ids[i], which it has exported as `transfer_id`.

        However it ends, cancelled too, no target block is written to afterwards; after an error they may hold
        anything. Ends at most `grace_s` after the deadline. Raises KvTransferRefused (not exported, other layout,
        too many waiting), KvTransferFailed (the source gave up), PeerUnavailable, DeadlineExceeded, KvBlockCorrupt
        (checksums), or what the engine's memory raised.
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
        """Look at the fabric every `probe_s`, and after each failed attempt to connect; open it anew where that helps,
        after pauses that double while it fails."""
        probe_s = self._settings.probe_s
        backoff = Backoff(2 * probe_s, max(2 * probe_s, LONGEST_PAUSE_S))
        pause_s = probe_s
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._doubt.wait()
            if self._doubt.is_set():
                self._doubt.clear()
                # Peers that are gone are doubted with each request for them: once in a while is enough.
                await self._clock.sleep(min(DOUBT_S, probe_s))
            pause_s = probe_s
            if self._fabric is not None and self._note_obstacle(self._fabric.obstacle()):
                continue
            staleness = self._fabric.staleness() if self._fabric is not None else self._obstacle
            if staleness and not await self._reopen(staleness):
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

    async def _reopen(self, staleness: str) -> bool:
        """Whether the agent can be reached again."""
        log.warning("the KV transfer agent is opened anew", extra={"reason": staleness})
        self._obstacle = f"the KV transfer agent is being opened anew: {staleness}"
        waited_s = 0.0
        while self._fabric is not None and self._is_moving and waited_s < self._settings.reopen_s:
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
            session = await self._session(peer)
            waited_s = self._clock.now_s() - began_s
            for first in range(0, len(runs), MAX_RUNS):
                left_s = deadline_s - (self._clock.now_s() - began_s)
                messages += await session.pull(transfer_id, runs[first : first + MAX_RUNS], ring, left_s)
        blocks = sum(run.blocks for run in runs)
        nbytes = blocks * self._memory.layout.block_bytes
        return TransferStats(transfer_id, blocks, nbytes, messages, waited_s, self._clock.now_s() - began_s)

    async def _session(self, peer: PeerAddress) -> Session:
        """The session that pulls from a peer use, opened if there is none."""
        opening = self._sessions.get(peer)
        if opening is None:
            if self._is_stopping or self._fabric is None:
                raise KvTransferRefused(self._obstacle or "this KV transfer agent is not running")
            if len(self._open) >= self._settings.max_connections:
                raise KvTransferRefused(f"this agent has {len(self._open)} connections, as many as it may")
            opening = asyncio.create_task(self._dial(self._fabric, peer), name=f"kv dial {peer}")
            self._sessions[peer] = opening
            opening.add_done_callback(lambda done: self._forget_if_failed(peer, done))
        # Others wait for the same attempt, and it is bounded by itself.
        return await asyncio.shield(opening)

    async def _dial(self, fabric: KvFabric, peer: PeerAddress) -> Session:
        endpoint = await fabric.connect(peer.host, peer.port)
        if self._is_stopping:
            endpoint.close()
            raise KvTransferRefused("this KV transfer agent is stopping")
        session = await self._greet(endpoint, str(peer))
        session.connection.on_cut.append(lambda _: self._forget(peer))
        return session

    def _accept(self, endpoint: KvEndpoint) -> None:
        if self._is_stopping or len(self._open) >= self._settings.max_connections:
            log.warning("a KV agent's connection was refused", extra={"connections": len(self._open)})
            endpoint.close()
            return
        self._spawn(self._greet_caller(endpoint), "kv accept")

    async def _greet_caller(self, endpoint: KvEndpoint) -> None:
        try:
            await self._greet(endpoint, "a caller")
        except RpcError as error:
            log.warning("a KV agent connected and did not introduce itself", extra={"reason": str(error)})
            self._doubt.set()

    async def _greet(self, endpoint: KvEndpoint, peer_name: str) -> Session:
        hello = Hello(PROTOCOL_VERSION, self._agent_id, self._memory.layout)
        connection = Connection(endpoint, hello, peer_name, next(self._keys))
        self._open[connection] = None
        connection.on_cut.append(self._closed)
        await connection.greet(self._settings.connect_s)
        if connection.is_cut:
            raise connection.lost()
        session = self._open[connection] = Session(connection, self._memory, self._settings, self._serve)
        return session

    def _forget_if_failed(self, peer: PeerAddress, opening: asyncio.Task[Session]) -> None:
        if opening.cancelled() or opening.exception() is not None or opening.result().connection.is_cut:
            self._forget(peer)
            self._doubt.set()

    def _forget(self, peer: PeerAddress) -> None:
        self._sessions.pop(peer, None)

    def _closed(self, connection: Connection) -> None:
        self._open.pop(connection, None)

    def _serve(self, session: Session, serving: ServedPull) -> None:
        reason = session.connection.refusal or self._refusal(serving.request)
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

    def _refusal(self, request: Pull) -> str:
        """Why a pull is not served; empty if it is."""
        packing = request.packing
        largest = max(self._memory.layout.region_block_bytes)
        if not max(largest, packing.gathered_bytes) <= packing.message_bytes <= self._settings.message_bytes:
            return (
                f"messages of {packing.message_bytes} bytes are asked for and {self._settings.message_bytes} is the "
                "largest here: give all workers one message_bytes"
            )
        if sum(count for _, count in request.runs) > self._memory.blocks:
            return f"more blocks are asked for than there are ({self._memory.blocks})"
        blocks = [block for first, count in request.runs for block in range(first, first + count)]
        return self._exports.refusal(request.export_id, blocks)

    async def _withdraw(self, export_id: str) -> None:
        self._exports.close(export_id)
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
