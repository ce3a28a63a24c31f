"""Two network namespaces with a cable between them: what two machines see. Needs root."""

import asyncio
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from tests.kv.peer_process import BLOCKS, PeerProcess, peer_process

BOUND_S = 15.0
"""What nothing here may take: usually it is far less, but a busy machine must not fail a test."""
ALL = list(range(BLOCKS))
BACKWARDS = ALL[::-1]
TCP = {"UCX_TLS": "tcp"}
"""Shared memory would cross the namespaces."""
HOSTS = ("10.213.77.1", "10.213.77.2")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)


@dataclass(frozen=True)
class Cable:
    """Namespaces `names[0]` and `names[1]`, each with one end."""

    names: tuple[str, str]

    def set(self, state: str) -> None:
        """Up or down, at the first end."""
        ip("-n", self.names[0], "link", "set", "kv0", state)

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
        ip("-n", names[0], "link", "add", "kv0", "type", "veth", "peer", "name", "kv1", "netns", names[1])
        for end, name in enumerate(names):
            ip("-n", name, "address", "add", f"{HOSTS[end]}/24", "dev", f"kv{end}")
            ip("-n", name, "link", "set", f"kv{end}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield Cable(names)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
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
        assert time.monotonic() - began < BOUND_S
        await source.until(serving=0, connections=0)
        await puller.until(pulling=0, connections=0)
        assert time.monotonic() - began < BOUND_S
        cable.set("up")
        assert (await pull(puller, source, [1, 2], 10.0))["blocks"] == 2
