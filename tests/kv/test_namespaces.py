"""Two network namespaces with a cable between them: what two machines see. Needs root."""

import asyncio
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from tests.in_time import eventually, within
from tests.kv.peer_process import BLOCKS, PeerProcess, peer_process

BOUND_S = 15.0
"""What nothing here may take: usually it is far less, but a busy machine must not fail a test."""
ALL = list(range(BLOCKS))
BACKWARDS = ALL[::-1]
TCP = {"UCX_TLS": "tcp", "UCX_LOG_LEVEL": "fatal"}
"""Shared memory would cross the namespaces, and what UCX says would come among the answers."""
HOSTS = ("10.213.77.1", "10.213.77.2")


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10, text=True).stdout


@dataclass(frozen=True)
class Cable:
    """Namespaces `names[0]` and `names[1]`, each with one end."""

    names: tuple[str, str]

    def set(self, state: str) -> None:
        """Up or down, at the first end."""
        ip("-n", self.names[0], "link", "set", "kv0", state)
        if state == "up":
            self._wait_for_carrier()

    def renew(self) -> None:
        """Another cable, with the names and addresses of the former."""
        ip("-n", self.names[0], "link", "delete", "kv0")
        self.lay()

    def lay(self) -> None:
        """The cable, up at both ends."""
        ip("-n", self.names[0], "link", "add", "kv0", "type", "veth", "peer", "name", "kv1", "netns", self.names[1])
        for end, name in enumerate(self.names):
            ip("-n", name, "address", "add", f"{HOSTS[end]}/24", "dev", f"kv{end}")
            ip("-n", name, "link", "set", f"kv{end}", "up")
        self._wait_for_carrier()

    def _wait_for_carrier(self) -> None:
        """The kernel says a moment after `ip` that a device runs; UCX uses none that does not."""
        for end, name in enumerate(self.names):
            eventually(lambda: "state UP" in ip("-n", name, "link", "show", f"kv{end}"), 60, f"kv{end} runs")  # noqa: B023

    def prefix(self, end: int) -> tuple[str, ...]:
        """Runs a command in a namespace."""
        return ("ip", "netns", "exec", self.names[end])


@pytest.fixture
def cable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cable]:
    if shutil.which("ip") is None:
        pytest.skip("needs the ip command (iproute2)")
    unique = tmp_path_factory.mktemp("cable").parent.name[-6:]
    names = (f"kv-a-{unique}", f"kv-b-{unique}")
    made: list[str] = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        for name in names:
            ip("-n", name, "link", "set", "lo", "up")
        cable = Cable(names)
        cable.lay()
        yield cable
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
    finally:
        for name in made:
            ip("netns", "delete", name)


async def two_peers(stack: AsyncExitStack, cable: Cable, read_ms: float) -> tuple[PeerProcess, PeerProcess]:
    source = await stack.enter_async_context(
        peer_process(prefix=cable.prefix(0), host=HOSTS[0], environment=TCP, read_ms=read_ms)
    )
    puller = await stack.enter_async_context(
        peer_process(2, prefix=cable.prefix(1), host=HOSTS[1], environment=TCP, gathered_bytes=128 * 1024)
    )
    await source.export("m1", ALL)
    return source, puller


async def pull(puller: PeerProcess, source: PeerProcess, blocks: list[int], deadline_s: float) -> dict[str, object]:
    address = {"host": source.address.host, "port": source.address.port}
    answer: dict[str, object] = await puller.tell(
        do="pull", id="m1", source=blocks, target=blocks, deadline_s=deadline_s, **address
    )
    return answer


async def test_blocks_move_between_machines(cable: Cable) -> None:
    async with AsyncExitStack() as stack:
        source, puller = await two_peers(stack, cable, read_ms=0.0)
        assert not await puller.tell(do="same")
        answer = await pull(puller, source, ALL, 10.0)
        assert answer["blocks"] == BLOCKS
        assert await puller.tell(do="same")


async def test_the_cable_is_pulled_out_midway(cable: Cable) -> None:
    async with AsyncExitStack() as stack:
        source, puller = await two_peers(stack, cable, read_ms=20.0)
        order = asyncio.create_task(pull(puller, source, BACKWARDS, 600.0))
        await source.until(serving=1)
        await asyncio.sleep(0.3)
        began = time.monotonic()
        cable.set("down")
        answer = await order
        assert str(answer["error"]).startswith("PeerUnavailable")
        assert "nothing was heard from it" in str(answer["error"])
        within(time.monotonic() - began, BOUND_S, "it fails, and does not hang")
        await source.until(serving=0, connections=0)
        await puller.until(pulling=0, connections=0)
        within(time.monotonic() - began, BOUND_S, "it fails, and does not hang")
        cable.set("up")
        async with asyncio.timeout(BOUND_S):  # TCP finds out in its own time that packets come through again
            while "blocks" not in (answer := await pull(puller, source, [1, 2], 10.0)):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert answer["blocks"] == 2


async def until_status(peer: PeerProcess, holds: Callable[[dict[str, object]], bool]) -> dict[str, object]:
    async with asyncio.timeout(BOUND_S):
        while True:
            status: dict[str, object] = await peer.tell(do="status")
            if holds(status):
                return status
            await asyncio.sleep(0.05)


async def test_an_agent_that_has_talked_to_nobody_is_opened_anew_with_its_device(cable: Cable) -> None:
    async with AsyncExitStack() as stack:
        source, puller = await two_peers(stack, cable, read_ms=0.0)
        cable.renew()
        for peer in (source, puller):
            status = await until_status(peer, lambda status: bool(status["reopened_total"]))
        await until_status(source, lambda status: not status["obstacle"])
        assert status["port"] == puller.address.port
        assert (await pull(puller, source, [1, 2], 10.0))["blocks"] == 2


async def test_one_that_cannot_be_reached_any_more_says_so_and_goes_on_with_whom_it_knows(cable: Cable) -> None:
    async with AsyncExitStack() as stack:
        source, puller = await two_peers(stack, cable, read_ms=0.0)
        assert (await pull(puller, source, [1, 2], 10.0))["blocks"] == 2
        assert not (await source.tell(do="status"))["obstacle"]
        cable.renew()
        status = await until_status(source, lambda status: "made anew" in str(status["obstacle"]))
        assert "restart the worker" in str(status["obstacle"])
        assert (await pull(puller, source, [3, 4], 10.0))["blocks"] == 2
        stranger = await stack.enter_async_context(
            peer_process(3, prefix=cable.prefix(1), host=HOSTS[1], environment=TCP)
        )
        # Were it not so, there would be nothing to tell of: UCX would have learnt to read its routes again.
        assert "length mismatch" in str((await pull(stranger, source, [1, 2], 10.0))["error"])
