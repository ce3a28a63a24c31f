"""Pulls that end before their time: the connection lives on, and nothing is written to afterwards."""

import asyncio
import time
from typing import Any

import pytest

from engine_worker.kv import ucx_worker
from engine_worker.kv.ucx_worker import UcxEndpoint
from mesh.errors import DeadlineExceeded, KvTransferFailed, KvTransferRefused
from tests.in_time import within
from tests.kv.peer_process import BLOCKS, LocalAgent, peer_process

BOUND_S = 15.0
"""What nothing here may take: usually it is far less, but a busy machine must not fail a test."""
ALL = range(BLOCKS)
DEADLINE_S = 20.0


async def test_cancelled_it_comes_to_rest_and_the_connection_lives_on() -> None:
    async with peer_process(read_ms=5.0) as peer, LocalAgent(gathered_bytes=128 * 1024) as agent:
        await peer.export("m1", ALL)
        pull = asyncio.create_task(agent.pull(peer.address, "m1", ALL, [*reversed(ALL)], DEADLINE_S))
        await agent.first_bytes(pull)
        pull.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pull
        kept = [region.copy() for region in agent.regions]
        await agent.pull(peer.address, "m1", [3], [0], DEADLINE_S)
        await asyncio.sleep(0.2)
        for region, before in zip(agent.regions, kept, strict=True):
            assert (region[1:] == before[1:]).all()
        status = await agent.status()
        assert (status.pulling, status.connections, status.failed_pulls_total) == (0, 1, 1)


async def test_withdrawn_midway_the_puller_is_told() -> None:
    async with peer_process(read_ms=5.0) as peer, LocalAgent(gathered_bytes=128 * 1024) as agent:
        await peer.export("m1", ALL)
        pull = asyncio.create_task(agent.pull(peer.address, "m1", ALL, [*reversed(ALL)], DEADLINE_S))
        await agent.first_bytes(pull)
        await peer.tell(do="withdraw", id="m1")
        with pytest.raises(KvTransferFailed, match="it was withdrawn"):
            await pull
        assert (await peer.tell(do="status"))["serving"] == 0
        await peer.export("m2", ALL)
        await agent.pull(peer.address, "m2", [1], [0], DEADLINE_S)
        assert (await agent.status()).connections == 1


async def test_the_deadline_holds_while_a_slow_source_still_answers() -> None:
    async with peer_process(read_ms=5.0) as peer, LocalAgent(gathered_bytes=128 * 1024) as agent:
        await peer.export("m1", ALL)
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="512 blocks of 'm1' did not arrive"):
            await agent.pull(peer.address, "m1", ALL, [*reversed(ALL)], 0.3)
        within(time.monotonic() - began, BOUND_S, "it fails, and does not hang")
        await agent.pull(peer.address, "m1", [1], [0], DEADLINE_S)
        assert (await agent.status()).connections == 1


async def test_an_agent_stops_though_it_is_about_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, asked, go_on = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    look_up = loop.getaddrinfo

    async def slow(*arguments: Any, **options: Any) -> Any:
        asked.set()
        await go_on.wait()
        return await look_up(*arguments, **options)

    async with peer_process() as peer, asyncio.timeout(BOUND_S):
        agent = LocalAgent()
        await agent.start()
        await peer.export("m1", ALL)
        monkeypatch.setattr(loop, "getaddrinfo", slow)
        pull = asyncio.create_task(agent.pull(peer.address, "m1", [1], [0], DEADLINE_S))
        await asked.wait()
        stop = asyncio.create_task(agent.stop())
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(KvTransferRefused, match="stopping"):
            await pull
        await stop


class Unending:
    """A request of UCX that ends when the test says so."""

    completed = False

    def check_error(self) -> None:
        """It has ended well."""


async def test_a_send_that_ucx_does_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen once, with a puller that was stopped in the midst: its source waited for ever. What is written to is waited
    for all the same."""
    monkeypatch.setattr(ucx_worker, "ABANDONED_S", 0.01)
    async with LocalAgent() as agent, asyncio.timeout(BOUND_S):
        worker: Any = agent._fabric
        endpoints = [UcxEndpoint(worker, None) for _ in range(2)]
        sent, received, others = Unending(), Unending(), Unending()
        sending = worker.submit(sent, b"", endpoints[0], is_data=True, is_send=True)
        receiving = worker.submit(received, b"", endpoints[0], is_data=True, is_send=False)
        other = worker.submit(others, b"", endpoints[1], is_data=True, is_send=True)
        worker.closed(endpoints[0])
        with pytest.raises(ConnectionError, match="did not end"):
            await sending
        assert not receiving.done()
        assert not other.done(), "its connection is open"
        received.completed = others.completed = True
        worker.wake()
        await receiving
        await other
