"""What a process takes from the machine it runs on: time, chance, threads and the network.

These are the four seams of the mesh, and there are no others. A role is given a `Runtime` and reads no clock, draws no
random number, starts no thread and opens no channel by itself (tests/unit/test_walls.py forbids it). So the same
role runs in a process of its own, and a whole mesh of roles runs inside one process on virtual time, where one seed
decides everything that happens (FoundationDB's simulation and TigerBeetle's VOPR are the models).

The event loop is part of the seam: `asyncio.sleep`, `asyncio.timeout` and `loop.call_later` follow the loop's own
time, which a virtual loop turns by itself.
"""

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar

import grpc

from mesh.errors import ConfigurationError
from mesh.identity.identity import Identity

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Clock(Protocol):
    """The two clocks of a machine."""

    def now_s(self) -> float:
        """Monotonic seconds since some fixed moment: for durations and deadlines."""

    def unix_s(self) -> float:
        """Seconds since 1970 by the wall clock, which may step either way: for what people and other machines read."""

    async def sleep(self, duration_s: float) -> None:
        """Return once `duration_s` have passed on the monotonic clock."""


class Entropy(Protocol):
    """Where random numbers come from: the system, or a seed in simulations."""

    def generator(self) -> random.Random:
        """A new generator, seeded by chance. Not for secrets."""

    def token_hex(self, random_bytes: int) -> str:
        """An identifier of `random_bytes` unpredictable bytes, in hexadecimal."""


class ThreadPool(Protocol):
    """Threads of one owner, so that its work waits for nobody else's."""

    async def run(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """The result of `function`, computed on one of the threads."""

    def close(self) -> None:
        """Begin nothing new. What runs is not waited for."""


class Threads(Protocol):
    """Work that would hold up the event loop."""

    async def run(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """The result of `function`, computed on a thread shared by the whole process."""

    def pool(self, threads: int, name: str) -> ThreadPool:
        """Threads of the caller's own; `close` it."""


class Transport(Protocol):
    """gRPC channels and servers. What they return has the types of `grpc.aio`, or behaves alike."""

    @property
    def identity(self) -> Identity | None:
        """Who this process is to others; None where nobody asks."""

    def channel(
        self, address: str, options: Sequence[tuple[str, Any]], interceptors: Sequence[Any], role: str = ""
    ) -> grpc.aio.Channel:
        """A channel to host:port. It connects when first used and reconnects by itself; close it when done. Where
        processes have identities, it does not connect to one of another `role`; empty: to any of the mesh."""

    def to_others(self) -> "Transport":
        """Channels to servers that are no processes of a mesh but ask for this one's certificate, such as etcd. Raises
        ConfigurationError where there is none."""

    def server(self, options: Sequence[tuple[str, Any]], interceptors: Sequence[Any]) -> grpc.aio.Server:
        """A gRPC server that listens nowhere yet."""

    def listen(self, server: grpc.aio.Server, bind: str) -> int:
        """Have it listen on host:port; returns the port. Raises RuntimeError if that cannot be had."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """The four seams of one process."""

    clock: Clock
    entropy: Entropy
    threads: Threads
    transport: Transport


class SystemClock:
    """The `Clock` of this machine."""

    def now_s(self) -> float:
        return time.monotonic()

    def unix_s(self) -> float:
        return time.time()

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)


class SystemEntropy:
    """The operating system's random source."""

    def generator(self) -> random.Random:
        """A generator seeded by the operating system."""
        return random.Random()

    def token_hex(self, random_bytes: int) -> str:
        return secrets.token_hex(random_bytes)


class SystemThreadPool:
    """The `ThreadPool` of a `concurrent.futures` executor."""

    def __init__(self, threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """The result of `function`, computed on one of the threads."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Begin nothing new. What runs is not waited for."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class SystemThreads:
    """The event loop's default threads, and pools of their own."""

    async def run(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """The result of `function`, computed on a thread of the event loop's default executor."""
        return await asyncio.to_thread(function, *args, **kwargs)

    def pool(self, threads: int, name: str) -> ThreadPool:
        """Threads of the caller's own; `close` it."""
        return SystemThreadPool(threads, name)


class GrpcTransport:
    """The `Transport` of grpc.aio over TCP, in plaintext; mesh/identity/tls.py has the one with identities."""

    identity = None

    def channel(
        self, address: str, options: Sequence[tuple[str, Any]], interceptors: Sequence[Any], role: str = ""
    ) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)

    def to_others(self) -> Transport:
        raise ConfigurationError("etcds:// needs an identity: --identity, or PENSTOCK_IDENTITY (docs/security.md)")

    def server(self, options: Sequence[tuple[str, Any]], interceptors: Sequence[Any]) -> grpc.aio.Server:
        return grpc.aio.server(options=options, interceptors=interceptors)

    def listen(self, server: grpc.aio.Server, bind: str) -> int:
        return int(server.add_insecure_port(bind))


def system_runtime(transport: Transport | None = None) -> Runtime:
    """The machine's own clock, entropy and threads, and gRPC over its network, in plaintext unless told otherwise."""
    return Runtime(SystemClock(), SystemEntropy(), SystemThreads(), transport or GrpcTransport())
