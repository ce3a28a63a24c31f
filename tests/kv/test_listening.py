"""An agent listens where it was told, as the kernel's own list of sockets says."""

import asyncio
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.errors import ConfigurationError
from services.cli.chaos.temporary_mesh import free_ports
from tests.kv.peer_process import LocalAgent, peer_process

LISTENING = "0A"


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports of the TCP sockets on which a process listens, from /proc/net/tcp and tcp6."""
    return {(host, port) for host, port, inode in _all_listening() if inode in _inodes(pid)}


def _inodes(pid: int) -> set[str]:
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            target = os.readlink(entry)
            if target.startswith("socket:["):
                found.add(target[8:-1])
    return found


def _all_listening() -> Iterator[tuple[str, int, str]]:
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            digits, port = fields[1].split(":")
            words = b"".join(struct.pack("=I", int(digits[at : at + 8], 16)) for at in range(0, len(digits), 8))
            if fields[3] == LISTENING:
                host = socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words)
                yield host, int(port, 16), fields[9]


async def test_on_the_loopback_and_nowhere_else() -> None:
    port, others = free_ports(2), listening(os.getpid())
    async with peer_process(port=port) as peer, LocalAgent() as agent:
        assert peer.address.port == port
        assert listening(peer.pid) == {("127.0.0.1", port), ("127.0.0.1", port + 1)}
        assert {host for host, _ in listening(os.getpid()) - others} == {"127.0.0.1"}
        await peer.export("m1", [1, 2])
        assert (await agent.pull(peer.address, "m1", [1, 2], [5, 6], 10.0)).blocks == 2


async def test_on_an_ipv6_address() -> None:
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        async with peer_process(host="::1") as peer, LocalAgent(host="::1") as agent:
            assert {host for host, _ in listening(peer.pid)} == {"::1"}
            await peer.export("m1", [1, 2])
            assert (await agent.pull(peer.address, "m1", [1, 2], [5, 6], 10.0)).blocks == 2
        return
    pytest.skip("this machine has no IPv6")


async def test_on_all_addresses_where_that_is_wanted() -> None:
    async with peer_process(host="0.0.0.0") as peer, LocalAgent() as agent:
        assert ("0.0.0.0", peer.address.port) in listening(peer.pid)
        await peer.export("m1", [1, 2])
        reached = replace(peer.address, host="127.0.0.1")
        assert (await agent.pull(reached, "m1", [1, 2], [5, 6], 10.0)).blocks == 2


async def test_a_port_that_is_taken_is_said_and_not_replaced() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port {port}|is the port taken"):
            async with asyncio.timeout(10), LocalAgent(port=port):
                pass
