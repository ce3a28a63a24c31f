"""The instances of the fleet: busy without an engine, known to the mesh by the worker's own links and announcements.

Each has `RUNNING` requests at any moment. A request brings 1,000 prompt tokens, the 4,200 characters of a conversation
in English, half of them cached from the turn before, and is answered with 250 tokens, one each 25 ms. So one ends and
another comes ten times a second, and stores 48 blocks, for which the full cache evicts as many. The blocks of some
system prompts are the same in all instances.
"""

import asyncio
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final, cast

import numpy as np
import uvloop
from prometheus_client import CollectorRegistry

from controlplane.model.instance import InstanceDescription, InstanceState, KvBlocks, KvTier, LoadReport
from engine_worker.decode_reporting import DecodeReporting
from engine_worker.metrics import WorkerMetrics
from engine_worker.monitor_link import MonitorLink
from engine_worker.request_table import RequestTable
from engine_worker.settings import WorkerSettings
from mesh.announcement import Announcement
from mesh.backoff import Backoff
from mesh.membership import Directory, Member
from mesh.rpc.framed.transport import FramedTransport
from mesh.runtime import GrpcTransport, Runtime, system_runtime
from mesh.store import open_store

MODEL: Final = "benchmark"
BLOCK_TOKENS: Final = 16
RUNNING: Final = 64
NEW_PROMPT_TOKENS: Final = 500
ANSWER_TOKENS: Final = 250
CONTEXT_TOKENS: Final = 1_000 + ANSWER_TOKENS // 2
TOKEN_INTERVAL_MS: Final = 25
REQUEST_BLOCKS: Final = -(-NEW_PROMPT_TOKENS // BLOCK_TOKENS) - (-ANSWER_TOKENS // BLOCK_TOKENS)
REQUESTS_PER_S: Final = 1000 * RUNNING / (ANSWER_TOKENS * TOKEN_INTERVAL_MS)
SYSTEM_BLOCKS: Final = 50 * 32
"""Of 50 system prompts with 512 tokens each."""
PREFILLED_PER_MS: Final = 5
"""Prompt tokens: an instance's total tells when a report was made."""
MAX_ADMITTED: Final = 1024
JOIN_PAUSE_S: Final = 0.05
"""Between two instances of a process that begin: all at once they would send their whole caches for longer than workers
wait for a monitor to read."""


def now_ms() -> float:
    """Of the machine's monotonic clock, which all its processes share."""
    return 1000 * time.monotonic()


def block_hashes(instance: int, start: int, stop: int) -> list[int]:
    """Of an instance's own blocks start to stop, as good as random (the finaliser of splitmix64)."""
    mixed = np.arange(start, stop, dtype=np.uint64) + np.uint64((instance + 1) << 40)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return cast("list[int]", (mixed ^ (mixed >> np.uint64(31))).tolist())


@dataclass(frozen=True, slots=True)
class Share:
    """The instances that one process plays."""

    store_url: str
    first: int
    count: int
    kv_blocks: int
    """Of each: so many stay cached."""
    settings: WorkerSettings
    slowdown: float
    """Requests come and end so many times more slowly."""
    interval_s: float
    """Between two changes of an instance, each of which makes a report due."""


class Instance:
    """What `MonitorLink` asks of an instance, of its request table and of its ledger of cached blocks."""

    def __init__(self, number: int, share: Share, seed: int) -> None:
        self.description = InstanceDescription(
            f"instance-{number:04d}",
            "1",
            "127.0.0.1:1",
            MODEL,
            "",
            "simulated",
            BLOCK_TOKENS,
            share.kv_blocks,
            32_768,
            256,
            8192,
        )
        self.state, self.hung = InstanceState.READY, False
        self.tier, self.capacity_blocks = KvTier.ENGINE, share.kv_blocks
        self.admissions_total = 0
        self._number = number
        self._random = np.random.default_rng((seed, number))
        self._requests_per_s = REQUESTS_PER_S / share.slowdown
        self._own_blocks = share.kv_blocks - SYSTEM_BLOCKS
        assert self._own_blocks > 0, "the cache holds more than the system prompts"
        self._stored = self._own_blocks
        self._finished = 0

    @property
    def table(self) -> "Instance":
        """What a report link asks of an engine for its requests: an instance plays both."""
        return self

    @property
    def blocks(self) -> list[int]:
        """All that is cached."""
        own = block_hashes(self._number, self._stored - self._own_blocks, self._stored)
        return block_hashes(-1, 0, SYSTEM_BLOCKS) + own

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def admitted_since(self, position: int) -> list[str]:
        """Ids of requests that came since."""
        return [self._request_id(RUNNING + each) for each in self._since(position)]

    @property
    def ends_total(self) -> int:
        """One ends as another comes."""
        return self.admissions_total

    def ended_since(self, position: int) -> list[str]:
        """Ids of requests that have ended since."""
        return [self._request_id(each) for each in self._since(position)]

    def _since(self, position: int) -> range:
        return range(max(position, self.admissions_total - MAX_ADMITTED), self.admissions_total)

    def _request_id(self, number: int) -> str:
        return f"chatcmpl-{self._number:08x}{number:024x}"

    def advance(self, elapsed_s: float) -> KvBlocks:
        """Requests end and others come; returns what that changes in the cache."""
        requests = int(self._random.poisson(elapsed_s * self._requests_per_s))
        self.admissions_total += requests
        self._finished += requests
        before, self._stored = self._stored, self._stored + min(requests * REQUEST_BLOCKS, self._own_blocks)
        return KvBlocks(
            stored=tuple(block_hashes(self._number, before, self._stored)),
            removed=tuple(block_hashes(self._number, before - self._own_blocks, self._stored - self._own_blocks)),
        )

    def load(self) -> LoadReport:
        """As of now."""
        return LoadReport(
            running_requests=RUNNING,
            queued_requests=int(self._random.integers(3)),
            queued_prefill_tokens=int(self._random.integers(2_000)),
            running_tokens=RUNNING * CONTEXT_TOKENS + int(self._random.integers(-2_000, 2_000)),
            kv_blocks_used=RUNNING * CONTEXT_TOKENS // BLOCK_TOKENS,
            generated_tokens_total=self._finished * ANSWER_TOKENS,
            prefilled_tokens_total=int(PREFILLED_PER_MS * now_ms()),
            step_ms=float(TOKEN_INTERVAL_MS),
            finished_requests_total=self._finished,
            decoding_requests=RUNNING,
            token_interval_ms=float(TOKEN_INTERVAL_MS),
            engine_hit_tokens_total=self._finished * NEW_PROMPT_TOKENS,
        )


def play(pipe: Connection, share: Share, seed: int) -> None:
    """A process of instances: says how many there are once all report, ends when it is told anything."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_play(pipe, share, seed))


async def _play(pipe: Connection, share: Share, seed: int) -> None:
    registry = CollectorRegistry()
    runtime = system_runtime(FramedTransport(GrpcTransport(), registry))
    store = open_store(share.store_url, runtime)
    directory = Directory(store)
    await directory.start()
    metrics = WorkerMetrics(registry)
    instances = [Instance(number, share, seed) for number in range(share.first, share.first + share.count)]
    monitors = await directory.wait_for("monitor", 1, 60)
    links = [[_link(each, to, share, metrics, runtime) for to in monitors] for each in instances]
    tasks = []
    for theirs in links:
        tasks += [asyncio.create_task(link.run()) for link in theirs]
        await asyncio.sleep(JOIN_PAUSE_S)
    tasks.append(asyncio.create_task(_live(instances, links, share.interval_s)))
    pipe.send(share.count)
    await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    os._exit(0)  # a fleet that withdraws one by one takes longer than one that is gone


async def _live(instances: list[Instance], links: list[list[MonitorLink]], interval_s: float) -> None:
    """Each instance has its turn once an interval, all of them evenly over it."""
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    last_s = [start_s] * len(instances)
    turn = 0
    while True:
        row = turn % len(instances)
        now_s = loop.time()
        change = instances[row].advance(now_s - last_s[row])
        last_s[row] = now_s
        for link in links[row]:
            link.note_step()
            if change.stored:
                link.note_cache(change)
        turn += 1
        await asyncio.sleep(max(0.0, start_s + turn * interval_s / len(instances) - loop.time()))


def _link(instance: Instance, monitor: Member, share: Share, metrics: WorkerMetrics, runtime: Runtime) -> MonitorLink:
    return MonitorLink(
        monitor.address,
        cast("Any", instance),
        [cast("Any", instance)],
        share.settings,
        metrics,
        Backoff(),
        runtime.clock.now_s,
        runtime.transport,
        DecodeReporting(RequestTable()),
    )


def keep_members(pipe: Connection, store_url: str, count: int) -> None:
    """A process that keeps as many workers announced: says when all are, ends when it is told anything."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_keep_members(pipe, store_url, count))


async def _keep_members(pipe: Connection, store_url: str, count: int) -> None:
    store = open_store(store_url, system_runtime())
    members = [Member("worker", f"instance-{number:04d}", "1", "127.0.0.1:1", "") for number in range(count)]
    announcements = [Announcement(store, member) for member in members]
    for announcement in announcements:
        await announcement.start()
        await asyncio.sleep(JOIN_PAUSE_S)
    pipe.send(count)
    await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
    os._exit(0)
