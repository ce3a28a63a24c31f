"""Both sides of a transfer against each other: however it ends, it comes to rest and leaves nothing behind."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.kv.memory import RegionMemory
from engine_worker.kv.messages import Cancel, Control, Digests, Done, Failed, Grant, Pull
from engine_worker.kv.plan import Packing, RegionBlocks, joint_runs
from engine_worker.kv.pulling import RunningPull
from engine_worker.kv.serving import ServedPull, request_refusal
from engine_worker.kv.staging import StagingRing
from mesh.errors import KvBlockCorrupt, KvTransferFailed, KvTransferRefused, PeerUnavailable
from tests.unit.engine_worker.kv.memory_wire import MemoryConnection, connected

pytestmark = pytest.mark.live

BLOCKS = 24
BLOCK_BYTES = 16
PACKING = Packing(message_bytes=64, gathered_bytes=48, direct_bytes=32)


class FailingMemory(RegionMemory):
    """Raises at the n-th copy."""

    copies_left = 10**9

    async def gather(self, blocks: Sequence[RegionBlocks], into: np.ndarray) -> None:
        self._count()
        await super().gather(blocks, into)

    async def scatter(self, blocks: Sequence[RegionBlocks], content: np.ndarray) -> None:
        self._count()
        await super().scatter(blocks, content)

    def _count(self) -> None:
        self.copies_left -= 1
        if self.copies_left < 0:
            raise KvBlockCorrupt("the engine does not want this block")


def memory(seed: int) -> FailingMemory:
    regions = [np.random.default_rng([seed, n]).integers(0, 256, (BLOCKS, BLOCK_BYTES), np.uint8) for n in range(2)]
    return FailingMemory(regions, model="m", dtype="uint8", block_tokens=4)


@dataclass
class Transfer:
    """One pull between two memories on a wire in memory."""

    source_ids: list[int]
    target_ids: list[int]
    checksums: bool = False
    window: int = 3
    grace_s: float = 10.0
    source: FailingMemory = field(default_factory=lambda: memory(1))
    target: FailingMemory = field(default_factory=lambda: memory(2))

    def __post_init__(self) -> None:
        runs = joint_runs(self.source_ids, self.target_ids)
        source_runs = tuple((run.source_block, run.blocks) for run in runs)
        request = Pull(1, "m1", source_runs, 0, 1000, PACKING, self.checksums)
        self.here, self.there = connected()
        self.pulling = RunningPull(self.here, request, runs, self.target, self.grace_s)  # type: ignore[arg-type]
        self.serving: ServedPull | None = None
        self.refusal = ""
        self.here.handle = self._to_puller
        self.there.handle = self._to_source
        self.here.on_cut.append(lambda _: self.pulling.lost())
        self.there.on_cut.append(lambda cut: self.serving.fail(cut.reason) if self.serving else None)
        self.tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        await self.pulling.run(StagingRing(self.target, self.window, PACKING.gathered_bytes), self.window)

    def blocks_are_right(self) -> bool:
        return all(
            (target[self.target_ids] == source[self.source_ids]).all()
            for target, source in zip(self.target._regions, self.source._regions, strict=True)
        )

    def _to_puller(self, message: Control) -> None:
        match message:
            case Done():
                self.pulling.done()
            case Failed():
                self.pulling.failed(message)
            case Digests():
                self.pulling.add_digests(message.values)

    def _to_source(self, message: Control) -> None:
        match message:
            case Pull():
                self.serving = ServedPull(self.there, message, self.source)  # type: ignore[arg-type]
                if self.refusal:
                    self.serving.refuse(self.refusal)
                else:
                    ring = StagingRing(self.source, self.window, PACKING.gathered_bytes)
                    self.tasks.add(asyncio.create_task(self.serving.run(ring, self.window)))
            case Grant():
                assert self.serving is not None
                self.serving.grant(message.granted)
            case Cancel():
                assert self.serving is not None
                self.serving.cancel()

    async def assert_at_rest(self) -> None:
        assert self.serving is not None
        await asyncio.wait_for(self.serving.at_rest, 20)
        await asyncio.wait_for(self.serving.closed, 20)
        for _ in range(5):
            await asyncio.sleep(0)
        assert self.here.left_over == self.there.left_over == 0


@pytest.mark.parametrize(
    ("packing", "refusal"),
    [
        (PACKING, ""),
        (Packing(message_bytes=128, gathered_bytes=48, direct_bytes=32), "64 is the largest here"),
        (Packing(message_bytes=64, gathered_bytes=96, direct_bytes=32), "64 is the largest here"),
        (Packing(message_bytes=64, gathered_bytes=32, direct_bytes=48), "less than 48 bytes"),
        (Packing(message_bytes=64, gathered_bytes=32, direct_bytes=0), "less than 0 bytes"),
    ],
)
def test_messages_that_no_puller_would_ask_for_are_refused(packing: Packing, refusal: str) -> None:
    told = request_refusal(Pull(1, "m1", ((0, 4),), 0, 1000, packing, False), memory(1), message_bytes=64)
    assert refusal in told
    assert bool(told) == bool(refusal)


@st.composite
def block_lists(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    count = draw(st.integers(1, BLOCKS))
    source = draw(st.lists(st.integers(0, BLOCKS - 1), min_size=count, max_size=count))
    target = list(draw(st.permutations(range(BLOCKS))))[:count]
    return (sorted(source), sorted(target)) if draw(st.booleans()) else (source, target)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.slow
@given(block_lists(), st.integers(1, 5), st.booleans())
def test_the_blocks_arrive_and_no_others_change(lists: tuple[list[int], list[int]], window: int, sums: bool) -> None:
    async def scenario() -> None:
        transfer = Transfer(*lists, checksums=sums, window=window)
        before = memory(2)
        await transfer.run()
        assert transfer.blocks_are_right()
        others = sorted(set(range(BLOCKS)) - set(transfer.target_ids))
        for now, then in zip(transfer.target._regions, before._regions, strict=True):
            assert (now[others] == then[others]).all()
        await transfer.assert_at_rest()
        assert not transfer.here.is_cut

    asyncio.run(scenario())


@given(
    block_lists(),
    st.integers(1, 5),
    st.sampled_from(["stop", "withdraw", "read fails", "write fails", "refuse"]),
    st.integers(0, 60),
)
def test_a_transfer_that_ends_early_leaves_the_connection_usable(
    lists: tuple[list[int], list[int]], window: int, trouble: str, after: int
) -> None:
    async def scenario() -> None:
        transfer = Transfer(*lists, window=window)
        transfer.refusal = "no such export" if trouble == "refuse" else ""
        transfer.source.copies_left = after if trouble == "read fails" else 10**9
        transfer.target.copies_left = after if trouble == "write fails" else 10**9
        running = asyncio.create_task(transfer.run())
        await turns(after)
        if trouble == "stop" and not running.done():
            transfer.pulling.stop(TimeoutError("enough"))
        if trouble == "withdraw" and transfer.serving is not None:
            transfer.serving.fail("withdrawn")
        await asyncio.wait((running,), timeout=20)
        error = running.exception()
        expected: dict[str, type[Exception]] = {
            "stop": TimeoutError,
            "withdraw": KvTransferFailed,
            "read fails": KvTransferFailed,
            "write fails": KvBlockCorrupt,
            "refuse": KvTransferRefused,
        }
        assert error is None or isinstance(error, expected[trouble])
        assert error is not None or transfer.blocks_are_right()
        assert trouble != "refuse" or error is not None
        assert error is not None or min(transfer.source.copies_left, transfer.target.copies_left) >= 0
        if transfer.serving is not None:
            await transfer.assert_at_rest()
        assert not transfer.here.is_cut, transfer.here.reason

    asyncio.run(scenario())


@given(block_lists(), st.integers(0, 60), st.sampled_from(["here", "there"]))
def test_a_cut_ends_both_sides(lists: tuple[list[int], list[int]], after: int, end: str) -> None:
    async def scenario() -> None:
        transfer = Transfer(*lists)
        running = asyncio.create_task(transfer.run())
        await turns(after)
        side: MemoryConnection = getattr(transfer, end)
        side.cut("the peer died")
        await asyncio.wait((running,), timeout=20)
        error = running.exception()
        assert error is None or isinstance(error, PeerUnavailable)
        assert error is not None or transfer.blocks_are_right()
        if transfer.serving is not None:
            await asyncio.wait_for(transfer.serving.at_rest, 20)

    asyncio.run(scenario())


async def test_a_source_that_hangs_is_cut_off_after_the_grace() -> None:
    transfer = Transfer(list(range(20)), list(range(20)), window=1, grace_s=0.01)
    running = asyncio.create_task(transfer.run())
    await turns(3)
    transfer.here.lose_control = True
    transfer.pulling.stop(TimeoutError("enough"))
    with pytest.raises(TimeoutError, match="enough"):
        await asyncio.wait_for(running, 20)
    assert transfer.here.is_cut
    assert "came to no rest" in transfer.here.reason


async def test_a_block_written_to_meanwhile_is_found_by_its_checksum() -> None:
    transfer = Transfer(list(range(20)), list(range(20)), checksums=True)
    send = transfer.there.send_data

    def torn(number: int, buffer: np.ndarray) -> "asyncio.Future[None]":
        if not transfer.source._regions[0][9].all():
            return send(number, buffer)
        transfer.source._regions[0][9] ^= 0xFF  # the engine's next step, between checksum and sending
        return send(number, buffer)

    transfer.source._regions[0][9] = 1
    transfer.there.send_data = torn  # type: ignore[method-assign]
    with pytest.raises(KvBlockCorrupt, match="written to meanwhile"):
        await transfer.run()
    await transfer.assert_at_rest()
