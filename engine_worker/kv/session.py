"""The transfers on one connection, both ways."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from engine_worker.kv.connection import Connection
from engine_worker.kv.heartbeat import Heartbeat
from engine_worker.kv.memory import KvMemory
from engine_worker.kv.messages import LAST_TRANSFER, Beat, Cancel, Control, Digests, Done, Failed, Grant, Pull
from engine_worker.kv.plan import Packing, Run
from engine_worker.kv.pulling import RunningPull
from engine_worker.kv.regions import Part
from engine_worker.kv.serving import ServedPull
from engine_worker.kv.settings import KvTransferSettings
from engine_worker.kv.staging import StagingRing
from mesh.errors import KvTransferFailed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PulledShare:
    """What one peer gives of the blocks that are pulled, and where it goes."""

    parts: tuple[Part, ...]
    """Of the peer's regions; empty for all of each."""
    memory: KvMemory
    is_verified: bool
    """By checksums, whatever the settings say."""


class Session:
    """Hands control messages to the transfers that they belong to."""

    def __init__(
        self,
        connection: Connection,
        memory: KvMemory,
        settings: KvTransferSettings,
        serve: Callable[["Session", ServedPull], None],
    ) -> None:
        """`serve` is called for every Pull of the peer."""
        self.connection = connection
        self._memory = memory
        self._settings = settings
        self._serve = serve
        self._numbers = cycle(range(1, LAST_TRANSFER + 1))
        self._pullings: dict[int, RunningPull] = {}
        self._servings: dict[int, ServedPull] = {}
        self._heartbeat = Heartbeat(
            settings.beat_s, settings.silent_beats, say=lambda: connection.send(Beat()), lost=connection.cut
        )
        connection.on_heard = self._heartbeat.heard
        connection.on_cut.append(self._on_cut)
        self._listening = asyncio.create_task(connection.listen(self._handle), name=f"kv {connection.peer_name}")
        self._listening.add_done_callback(self._on_listener_end)

    async def pull(
        self, export_id: str, token: str, runs: Sequence[Run], ring: StagingRing, deadline_s: float, share: PulledShare
    ) -> int:
        """Pull a share of runs of blocks, by the export's token; returns the messages it took. Errors as of
        `RunningPull.run`; when cancelled, it ends only once the transfer is at rest. The source is told the deadline;
        here, the caller keeps it."""
        pulling = self._new_pulling(export_id, token, runs, deadline_s, share)
        number = pulling.request.transfer
        self._pullings[number] = pulling
        self._heartbeat.start()
        run = asyncio.create_task(pulling.run(ring, self._settings.window_messages), name=f"kv pull {export_id}")
        try:
            await asyncio.shield(run)
        except asyncio.CancelledError:
            pulling.stop(KvTransferFailed("it was cancelled"))
            await at_rest(run)
            raise
        finally:
            del self._pullings[number]
            self._rest()
        return pulling.messages

    def serving_of(self, export_id: str) -> list[ServedPull]:
        """Transfers that read the blocks of an export."""
        return [serving for serving in self._servings.values() if serving.request.export_id == export_id]

    def _new_pulling(
        self, export_id: str, token: str, runs: Sequence[Run], deadline_s: float, share: PulledShare
    ) -> RunningPull:
        settings, transfer = self._settings, next(self._numbers)
        request = Pull(
            transfer=transfer,
            export_id=export_id,
            runs=tuple((run.source_block, run.blocks) for run in runs),
            granted=0,
            deadline_ms=max(1, round(deadline_s * 1000)),
            packing=Packing(settings.message_bytes, settings.gathered_bytes, settings.direct_bytes),
            checksums=settings.checksums or share.is_verified,
            parts=share.parts,
            is_copied=share.is_verified,
            proof=self.connection.proof(token, export_id, transfer),
        )
        return RunningPull(self.connection, request, runs, share.memory, settings.grace_s)

    def _handle(self, message: Control) -> None:
        match message:
            case Pull():
                serving = ServedPull(self.connection, message, self._memory)
                self._servings[message.transfer] = serving
                self._heartbeat.start()
                serving.closed.add_done_callback(lambda _: self._served(message.transfer))
                self._serve(self, serving)
            case Grant() | Cancel():
                self._handle_puller(message)
            case Done() | Failed() | Digests():
                self._handle_source(message)
            case Beat():
                pass  # that it came is all it says

    def _handle_puller(self, message: Grant | Cancel) -> None:
        """About a transfer that is served here; it may have ended meanwhile."""
        serving = self._servings.get(message.transfer)
        if serving is None:
            return
        if isinstance(message, Grant):
            serving.grant(message.granted)
        else:
            serving.cancel()

    def _handle_source(self, message: Done | Failed | Digests) -> None:
        pulling = self._pullings.get(message.transfer)
        if pulling is None:
            return
        match message:
            case Done():
                pulling.done()
            case Failed():
                pulling.failed(message)
            case Digests():
                pulling.add_digests(message.values)

    def _served(self, transfer: int) -> None:
        self._servings.pop(transfer, None)
        self._rest()

    def _rest(self) -> None:
        if not self._pullings and not self._servings:
            self._heartbeat.stop()

    def _on_cut(self, connection: Connection) -> None:
        self._heartbeat.stop()
        for pulling in self._pullings.values():
            pulling.lost()
        for serving in tuple(self._servings.values()):
            serving.fail(connection.reason)

    def _on_listener_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("a KV connection's listener died", exc_info=error)
            self.connection.cut(f"this agent failed: {error!r}")


async def at_rest(task: "asyncio.Task[Any]") -> None:
    """Wait for a task that was stopped and ends by itself within a bound, even if cancelled again. Its error is
    of no interest any more."""
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            continue
    if not task.cancelled():
        task.exception()
