"""The engine core's end and the ranks' end of an instance whose KV is spread over processes, without vLLM."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq.asyncio
from zmq.constants import SocketOption, SocketType

from engine_worker.engines.vllm.connector.bridge import CoreBridge
from engine_worker.engines.vllm.connector.inbox import Received
from engine_worker.engines.vllm.connector.messages import FromCore, PausedNotice, Published
from engine_worker.engines.vllm.connector.orders import HeldPrefix, Load
from engine_worker.engines.vllm.connector.rank_bridge import RankBridge
from engine_worker.engines.vllm.connector.rank_messages import (
    FromRank,
    HoldReady,
    LoadReady,
    RankAnswer,
    RankAskStatus,
    RankCall,
    RankCancel,
    RankCapturing,
    RankEvent,
    RankExport,
    RankHello,
    RankPull,
    RankPulled,
    RankStates,
    RankStatus,
    RankValue,
    RankWithdraw,
    ToRank,
    Unstaged,
)
from engine_worker.engines.vllm.connector.ranks import CANCELLED, RANKS_SUFFIX, RankAgents
from engine_worker.kv.agent import KvTransferAgent
from engine_worker.kv.connection import PeerAddress
from engine_worker.kv.layout import KvLayout
from engine_worker.kv.memory import RegionMemory
from engine_worker.kv.settings import KvTransferSettings
from engine_worker.kv.transfer import AgentDescription, AgentStatus, TransferStats
from mesh.errors import EngineFailed, KvBlockCorrupt
from mesh.runtime import SystemClock, SystemEntropy
from tests.kv.peer import TOKEN

pytestmark = pytest.mark.live

WAIT_S = 20.0
PEER = PeerAddress("10.0.0.7", 7300, (7302,), TOKEN)
STATUS = AgentStatus(0, 0, 0, 0, 1, ("m1",), 3, 4, 0, 100, 0.5, port=7000)


class Rank:
    """What a rank says is up to the test."""

    def __init__(self, endpoint: str, number: int) -> None:
        self.number = number
        self.calls: asyncio.Queue[RankCall] = asyncio.Queue()
        self.cancelled: asyncio.Queue[int] = asyncio.Queue()
        self._socket: Any = zmq.asyncio.Context.instance().socket(SocketType.DEALER)
        self._socket.setsockopt(SocketOption.LINGER, 0)
        self._socket.connect(endpoint + RANKS_SUFFIX)
        self._reading = asyncio.create_task(self._read())

    async def say(self, message: FromRank) -> None:
        await self._socket.send(msgspec.msgpack.encode(message))

    async def hello(self) -> None:
        layout = KvLayout("m", "float32", 32, (64, 64), rank=self.number, ranks=2)
        about = AgentDescription(f"rank-{self.number}", 7000 + self.number, layout, KvTransferSettings())
        await self.say(RankHello(self.number, about))

    async def answer(self, value: RankValue | None = None, error: str = "") -> None:
        """The next call, whose command it returns."""
        async with asyncio.timeout(WAIT_S):
            call = await self.calls.get()
        await self.say(RankAnswer(self.number, call.number, value, error, f"rank {self.number} says so"))

    def close(self) -> None:
        self._reading.cancel()
        self._socket.close()

    async def _read(self) -> None:
        while True:
            message = msgspec.msgpack.decode(await self._socket.recv(), type=ToRank)
            if isinstance(message, RankCancel):
                self.cancelled.put_nowait(message.number)
            else:
                self.calls.put_nowait(message)


@asynccontextmanager
async def instance(
    path: Path, on_all: Callable[[RankEvent], None] = lambda event: None
) -> AsyncIterator[tuple[RankAgents, Rank, Rank]]:
    endpoint = f"ipc://{path}/moves"
    agents = RankAgents(endpoint, 2, on_all)
    ranks = Rank(endpoint, 0), Rank(endpoint, 1)
    try:
        for rank in ranks:
            await rank.hello()
        await agents.start(WAIT_S)
        yield agents, *ranks
    finally:
        for rank in ranks:
            rank.close()
        await agents.stop()


async def eventually(task: "asyncio.Task[Any]") -> Any:
    async with asyncio.timeout(WAIT_S):
        return await task


def pulled(nbytes: int) -> RankPulled:
    return RankPulled(TransferStats("m1", 3, nbytes, 1, 0.0, nbytes / 1000))


async def test_blocks_are_shared_once_all_ranks_serve_them(tmp_path: Path) -> None:
    async with instance(tmp_path) as (agents, first, second):
        sharing = asyncio.create_task(agents.share("m1", (1, 2), TOKEN))
        await first.answer()
        async with asyncio.timeout(WAIT_S):
            call = await second.calls.get()
        assert call.command == RankExport("m1", (1, 2), TOKEN)
        assert not sharing.done()
        await second.say(RankAnswer(1, call.number))
        await eventually(sharing)


async def test_each_rank_pulls_its_part(tmp_path: Path) -> None:
    async with instance(tmp_path) as (agents, first, second):
        pull = asyncio.create_task(agents.pull(PEER, "m1", (1, 2, 3), (4, 5, 6), 5.0))
        await first.answer(pulled(100))
        await second.answer(pulled(200))
        stats = await eventually(pull)
        assert (stats.blocks, stats.nbytes, stats.messages, stats.duration_s) == (3, 300, 2, 0.2)


async def test_a_rank_that_fails_ends_the_others_and_the_pull_is_over_when_all_are_at_rest(tmp_path: Path) -> None:
    async with instance(tmp_path) as (agents, first, second):
        pull = asyncio.create_task(agents.pull(PEER, "m1", (1,), (4,), 5.0))
        await second.answer(error="KvBlockCorrupt")
        async with asyncio.timeout(WAIT_S):
            call, cancelled = await first.calls.get(), await first.cancelled.get()
        assert call.number == cancelled
        assert isinstance(call.command, RankPull)
        assert call.command.peer == f"{TOKEN}@10.0.0.7:7300,7302"
        assert not pull.done(), "the first one may still write"
        await first.say(RankAnswer(0, call.number, None, CANCELLED))
        with pytest.raises(KvBlockCorrupt, match="rank 1: rank 1 says so"):
            await eventually(pull)


async def test_a_pull_that_is_cancelled_ends_when_all_ranks_are_at_rest(tmp_path: Path) -> None:
    async with instance(tmp_path) as (agents, first, second):
        pull = asyncio.create_task(agents.pull(PEER, "m1", (1,), (4,), 5.0))
        async with asyncio.timeout(WAIT_S):
            calls = [await rank.calls.get() for rank in (first, second)]
        pull.cancel()
        for rank, call in zip((first, second), calls, strict=True):
            assert not pull.done()
            async with asyncio.timeout(WAIT_S):
                assert await rank.cancelled.get() == call.number
            await rank.say(RankAnswer(rank.number, call.number, None, CANCELLED))
        with pytest.raises(asyncio.CancelledError):
            await eventually(pull)


async def test_what_all_ranks_have_said_is_told_once(tmp_path: Path) -> None:
    told: list[RankEvent] = []
    load = Load("c-1", "c", "m1", PEER.with_token, (1,), (2,), 5.0)
    async with instance(tmp_path, told.append) as (agents, first, second):
        for rank in (first, second):
            assert told == []
            for event in (
                LoadReady(rank.number, load),
                HoldReady(rank.number, "h", (1, 2)),
                Unstaged(rank.number, "m"),
            ):
                await rank.say(event)
            asking = asyncio.create_task(agents.withdraw("m"))  # answered behind the events
            await first.answer()
            await second.answer()
            await eventually(asking)
        assert told == [LoadReady(1, load), HoldReady(1, "h", (1, 2)), Unstaged(1, "m")]


async def test_they_are_described_and_asked_as_one(tmp_path: Path) -> None:
    async with instance(tmp_path) as (agents, first, second):
        about = await agents.describe()
        assert (about.port, about.more_ports, about.layout.block_bytes) == (7000, (7001,), 256)
        asking = asyncio.create_task(agents.status())
        await first.answer(RankStatus(STATUS))
        await second.answer(RankStatus(replace(STATUS, port=7001, obstacle="no device", pulled_bytes_total=11)))
        status = await eventually(asking)
        assert (status.port, status.more_ports) == (7000, (7001,))
        assert (status.pulls_total, status.pulled_bytes_total) == (4, 111)
        assert status.obstacle == "rank 1: no device"


async def test_a_rank_that_does_not_answer_is_an_obstacle(tmp_path: Path) -> None:
    async with instance(tmp_path) as (agents, first, _):
        asking = asyncio.create_task(agents.status())
        await first.answer(RankStatus(STATUS))
        assert (await eventually(asking)).obstacle == "rank 1: its KV transfer agent does not answer"


async def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/moves"
    agents, rank = RankAgents(endpoint, 2, lambda event: None), Rank(endpoint, 1)
    await rank.hello()
    with pytest.raises(EngineFailed, match=r"of 2 ranks these have a KV transfer agent after 1 s: (1|none)"):
        await agents.start(1.0)
    rank.close()
    await agents.stop()


def core_bridge(pull: Callable[..., Any]) -> tuple[CoreBridge, list[FromCore]]:
    """On the test's own loop; what it would say is kept instead."""
    bridge, said = CoreBridge("inproc://nowhere"), list[FromCore]()
    bridge._loop.close()
    bridge._loop = asyncio.get_running_loop()
    bridge.has_ranks = True
    agents = RankAgents("inproc://nowhere", 2, bridge._all_said)
    agents.pull = pull  # type: ignore[method-assign]
    bridge._agent = agents
    bridge._send = said.append  # type: ignore[method-assign, assignment]
    return bridge, said


async def test_a_load_that_was_cancelled_before_all_ranks_were_ready_pulls_nothing_and_ends() -> None:
    pulls: list[str] = []

    async def pull(peer: PeerAddress, transfer_id: str, *_: Any) -> None:
        pulls.append(transfer_id)

    bridge, _ = core_bridge(pull)
    first, second = (Load(f"c-{n}", f"l{n}", f"m{n}", PEER.with_token, (1,), (2,), 5.0) for n in (1, 2))
    bridge._cancel_load("c-1")
    for load in (first, second):
        bridge._all_said(LoadReady(1, load))
    await turns()
    assert pulls == ["m2"]
    assert list(bridge.inbox) == [Received("c-1", ()), Received("c-2", ())]


async def test_a_pause_is_told_after_the_blocks_that_were_published_before_it() -> None:
    bridge, said = core_bridge(lambda: None)
    served = asyncio.Event()

    async def share(export_id: str, block_ids: tuple[int, ...], kv_token: str) -> None:
        await served.wait()

    bridge._share = share
    bridge._exports["m1"] = TOKEN
    notice = PausedNotice("r1", "i1", (7,), 40, (3, 4))
    bridge._publish("m1", 0, (3, 4))
    bridge._publish("withdrawn", 0, (5,))
    bridge._hold("i1", ["m1"], notice)
    await turns()
    assert said == [], "a rank does not serve the blocks yet"
    served.set()
    await turns()
    assert said == [Published("m1", 0, (3, 4)), notice]


def rank_bridge() -> tuple[RankBridge, list[FromRank], KvTransferAgent]:
    """On the test's own loop; what it would say is kept instead."""
    bridge, said = RankBridge("inproc://nowhere", 1), list[FromRank]()
    bridge._loop.close()
    bridge._loop = asyncio.get_running_loop()
    memory = RegionMemory([np.zeros((8, 16), np.uint8)], model="m", dtype="uint8", block_tokens=16)
    bridge._agent = agent = KvTransferAgent(memory, KvTransferSettings(), SystemClock(), SystemEntropy(), agent_id="a")

    async def say(message: FromRank) -> None:
        said.append(message)

    bridge._say = say  # type: ignore[method-assign]
    return bridge, said, agent


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_a_preempted_request_had_is_never_exported_again() -> None:
    bridge, _, agent = rank_bridge()
    await bridge._carry_out(RankExport("m1", (1, 2), TOKEN))
    await bridge._carry_out(RankExport("m2", (3,), TOKEN))
    assert agent.exported == ("m1", "m2")
    await bridge._break(("m1",))
    await bridge._carry_out(RankExport("m1", (4,), TOKEN))  # which the core said before it heard of it
    assert agent.exported == ("m2",)


async def test_every_call_is_answered_cancelled_ones_too() -> None:
    bridge, said, _ = rank_bridge()
    for number, command in enumerate(
        (RankWithdraw("m1"), RankAskStatus(), RankPull("nonsense", "m1", (1,), (2,), 1.0))
    ):
        await bridge._answer(number, command)
    bridge._take(RankCall(8, RankWithdraw("m1")))
    bridge._take(RankCancel(8))  # before it began
    bridge._take(RankCancel(9))  # of one that is over
    await turns()
    errors = {answer.number: answer.error for answer in said if isinstance(answer, RankAnswer)}
    assert errors == {0: "", 1: "", 2: "KvTransferRefused", 8: CANCELLED}


async def test_a_step_that_has_come_is_told_after_the_engine_is_marked() -> None:
    bridge, said, _ = rank_bridge()
    marks: list[int] = []

    class Memory:
        def mark_engine(self) -> None:
            marks.append(len(said))

    bridge._memory = Memory()
    load = Load("c-1", "c", "m1", PEER.with_token, (1,), (2,), 5.0)
    bridge.load(load)
    bridge.publish_hold(HeldPrefix("h", (1,)))
    bridge.unstage_later("m1")
    await turns()
    assert marks == [0, 0]
    assert said == [LoadReady(1, load), HoldReady(1, "h", (1,)), Unstaged(1, "m1")]


async def test_the_rank_with_hidden_states_tells_them_and_an_obstacle_has_its_rank(tmp_path: Path) -> None:
    told: list[bytes] = []
    endpoint = f"ipc://{tmp_path}/moves"
    agents = RankAgents(endpoint, 2, lambda event: None, told.append)
    first, second = Rank(endpoint, 0), Rank(endpoint, 1)
    try:
        for rank in (first, second):
            await rank.hello()
        await agents.start(WAIT_S)
        for obstacles, reason in ((("", ""), ""), (("", "speculative decoding"), "rank 1: speculative decoding")):
            capturing = asyncio.create_task(agents.capture(20))
            for rank, obstacle in zip((first, second), obstacles, strict=True):
                await rank.answer(RankCapturing(obstacle))
            assert await eventually(capturing) == reason
        await second.say(RankStates(1, b"states"))
        async with asyncio.timeout(WAIT_S):
            while not told:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert told == [b"states"]
    finally:
        for rank in (first, second):
            rank.close()
        await agents.stop()


async def test_the_status_of_all_ranks_has_that_of_each(tmp_path: Path) -> None:
    async with instance(tmp_path) as (agents, first, second):
        asking = asyncio.create_task(agents.status())
        await first.answer(RankStatus(STATUS))
        await second.answer(RankStatus(replace(STATUS, port=7002, obstacle="eth0 is down", pulled_bytes_total=7)))
        status = await eventually(asking)
        assert [(each.core, each.rank, each.port, each.obstacle) for each in status.ranks] == [
            (0, 0, 7000, ""),
            (0, 1, 7002, "eth0 is down"),
        ]
        assert [each.pulled_bytes_total for each in status.ranks] == [100, 7]
