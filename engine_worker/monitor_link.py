"""The report stream to one monitor: dialled, fed and dialled again."""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import grpc

from controlplane.decode_message import decode_message
from controlplane.load_message import load_message
from controlplane.model.instance import InstanceState, KvBlocks
from engine_worker import wire
from engine_worker.cache_ledger import CacheLedger, KvBacklog
from engine_worker.decode_reporting import DecodeReporting
from engine_worker.instance import Instance
from engine_worker.metrics import WorkerMetrics
from engine_worker.settings import WorkerSettings
from mesh.backoff import Backoff
from mesh.errors import DeadlineExceeded, PeerUnavailable, RpcError
from mesh.rpc.client import open_channel, rpc_error
from mesh.runtime import Transport
from penstock.v1 import monitor_pb2, monitor_pb2_grpc

# When the next load report is due. Pure.

SHORTEST_WAIT_S = 1e-6
"""What is left of a pause and is shorter is over: a clock need not even move by 7e-15 s."""


class Pacing:
    """After a step, but not within `interval_s` of the last report, or what the monitor asks for; without steps, every
    `heartbeat_s`."""

    def __init__(self, interval_s: float, heartbeat_s: float) -> None:
        self._interval_s = interval_s
        self._asked_s = 0.0
        self._heartbeat_s = heartbeat_s
        self._last_sent_s = -math.inf
        self._is_dirty = False
        self._is_urgent = False

    def note_asked(self, interval_s: float) -> None:
        """The monitor asks for reports that are so far apart; more than the time of a heartbeat it does not get."""
        self._asked_s = min(interval_s, self._heartbeat_s)

    def note_change(self) -> bool:
        """There is news. Returns whether it is the first since the last report."""
        was_dirty, self._is_dirty = self._is_dirty, True
        return not was_dirty

    def note_urgent(self) -> None:
        """There is news that must not wait."""
        self._is_urgent = True

    def due_in_s(self, now_s: float) -> float:
        """Seconds until the next report; 0 or less when it is due."""
        if self._is_urgent:
            return 0.0
        pause_s = max(self._interval_s, self._asked_s) if self._is_dirty else self._heartbeat_s
        left_s = self._last_sent_s + pause_s - now_s
        return left_s if left_s > SHORTEST_WAIT_S else 0.0

    def note_sent(self, now_s: float) -> None:
        """A report was sent; no change waits for one any more."""
        self._last_sent_s = now_s
        self._is_dirty = self._is_urgent = False


log = logging.getLogger(__name__)

WRITE_TIMEOUT_S = 5.0
"""A monitor that does not read for this long is dialled anew."""


class MonitorLink:
    """Reports load and KV changes to one monitor. A monitor that was away gets everything again."""

    def __init__(
        self,
        address: str,
        instance: Instance,
        ledgers: Sequence[CacheLedger],
        settings: WorkerSettings,
        metrics: WorkerMetrics,
        backoff: Backoff,
        clock: Callable[[], float],
        transport: Transport,
        decoding: DecodeReporting,
    ) -> None:
        self._address = address
        self._instance = instance
        self._ledgers = ledgers
        self._settings = settings
        self._metrics = metrics
        self._backoff = backoff
        self._clock = clock
        self._transport = transport
        self._decoding = decoding
        self._decoding_told_s = -inf
        self._backlogs = {each.tier: KvBacklog(each.capacity_blocks, each.tier) for each in ledgers}
        self._pacing = self._fresh_pacing()
        self._wake = asyncio.Event()
        self._counted: tuple[int, int] | None = None
        """Admissions and ends when the last report of this stream was made."""
        self._state_told: InstanceState | None = None
        self._acks = 0

    def note_step(self) -> None:
        """The instance has made a step or changed its state."""
        if self._instance.state is not self._state_told:
            self._pacing.note_urgent()
            self._wake.set()
        if self._pacing.note_change():
            self._wake.set()

    def note_cache(self, change: KvBlocks) -> None:
        """What is cached in a tier has changed, so a report is due."""
        self._backlogs[change.tier].add(change)
        if self._pacing.note_change():
            self._wake.set()

    def readdress(self, address: str) -> None:
        """The monitor is to be found elsewhere from now on. A stream to it stays as long as it lives."""
        self._address = address

    async def run(self) -> None:
        """Keep a report stream to the monitor until cancelled; dial again, with back-off, whenever it breaks."""
        while True:
            try:
                await self._report()
            except RpcError as error:
                self._metrics.report_failures.inc()
                log.warning("the report stream broke; dialling again", extra={"error": str(error)})
            await asyncio.sleep(self._backoff.next_s())

    async def _report(self) -> None:
        """One report stream, until it breaks. Raises RpcError."""
        peer = f"the monitor at {self._address}"
        try:
            async with open_channel(self._transport, self._address, "monitor") as channel:
                stub = monitor_pb2_grpc.MonitorStub(channel)  # type: ignore[no-untyped-call]
                await self._converse(stub.Report())
        except TimeoutError:
            raise DeadlineExceeded(f"{peer} did not read for {WRITE_TIMEOUT_S:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise rpc_error(error, peer) from error
        raise PeerUnavailable(f"{peer} has ended the report stream; is it stopping?")

    async def _converse(self, call: Any) -> None:
        """Return when the monitor ends the stream; raise what broke it."""
        reader = asyncio.create_task(self._read_acks(call))
        reader.add_done_callback(lambda _: self._wake.set())
        try:
            await self._feed(call, reader)
            await reader
        except asyncio.InvalidStateError:
            # How grpc.aio answers a write to a call that has ended; the reader knows why it has.
            await reader
        finally:
            call.cancel()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _feed(self, call: Any, reader: asyncio.Task[None]) -> None:
        for backlog in self._backlogs.values():
            backlog.restart()
        self._pacing = self._fresh_pacing()
        self._counted = self._state_told = None
        self._decoding_told_s = -inf
        hello = wire.description_message(self._instance.description)
        await _send(call, monitor_pb2.WorkerReport(hello=hello))
        while not reader.done():
            self._pacing.note_sent(self._clock())
            for ledger in self._ledgers:
                for piece in self._backlogs[ledger.tier].take(ledger.blocks):
                    await _send(call, monitor_pb2.WorkerReport(kv=wire.kv_update_message(piece)))
            if not self._instance.hung:
                await _send(call, monitor_pb2.WorkerReport(load=self._next_load()))
                if self._is_decoding_due():
                    await _send(call, monitor_pb2.WorkerReport(decode=decode_message(self._decoding.load())))
            await self._wait_until_due(reader)

    async def _wait_until_due(self, reader: asyncio.Task[None]) -> None:
        """Return when a report is due or the stream has ended."""
        self._wake.clear()
        while not reader.done() and (due_in_s := self._pacing.due_in_s(self._clock())) > 0:
            try:
                async with asyncio.timeout(due_in_s):
                    await self._wake.wait()
            except TimeoutError:
                continue
            self._wake.clear()

    def _next_load(self) -> Any:
        table = self._instance.table
        if self._counted is None:
            admitted, ended = [tracked.request.request_id for tracked in table], list[str]()
        else:
            admissions, ends = self._counted
            admitted, ended = table.admitted_since(admissions), table.ended_since(ends)
        self._counted = table.admissions_total, table.ends_total
        self._state_told = self._instance.state
        return load_message(self._instance.load(), self._instance.state, admitted, ended)

    def _is_decoding_due(self) -> bool:
        interval_s, now_s = self._decoding.interval_s, self._clock()
        if interval_s is None or now_s - self._decoding_told_s < interval_s:
            return False
        self._decoding_told_s = now_s
        return True

    async def _read_acks(self, call: Any) -> None:
        async for ack in call:
            self._acks += 1
            self._pacing.note_asked(ack.report_interval_ms / 1000)
            self._backoff.reset()

    def _fresh_pacing(self) -> Pacing:
        return Pacing(self._settings.report_interval_ms / 1000, self._settings.heartbeat_ms / 1000)


async def _send(call: Any, report: monitor_pb2.WorkerReport) -> None:
    async with asyncio.timeout(WRITE_TIMEOUT_S):
        await call.write(report)
