"""The four seams of a simulated process (`mesh.runtime`)."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import grpc

from fault_simulation.framed import FramedOverNetwork
from fault_simulation.grpc_channel import SimulatedChannel
from fault_simulation.grpc_server import SimulatedServer
from fault_simulation.loop import VirtualLoop
from fault_simulation.network import Network
from fault_simulation.node import Node
from mesh.runtime import Arguments, Result, Runtime, ThreadPool, Transport

SHORTEST_WORK_S: Final = 0.0001
LONGEST_WORK_S: Final = 0.005
START_UNIX_S: Final = 1_800_000_000.0


@dataclass(slots=True)
class WallClock:
    """The wall clock of one machine: virtual time, wherever it was set to."""

    step_s: float = 0.0


class SimulatedClock:
    """The clocks of one node."""

    def __init__(self, loop: VirtualLoop, node: Node, wall: WallClock) -> None:
        self._loop = loop
        self._offset_s = node.clock_offset_s
        self._wall = wall

    def now_s(self) -> float:
        """Virtual time since this machine's own beginning."""
        return self._loop.now_s + self._offset_s

    def unix_s(self) -> float:
        """What the machine takes the time for."""
        return START_UNIX_S + self._loop.now_s + self._wall.step_s

    async def sleep(self, duration_s: float) -> None:
        """Return once `duration_s` have passed."""
        await asyncio.sleep(duration_s)


class SimulatedEntropy:
    """Chance that a seed decides."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def generator(self) -> random.Random:
        """Another generator each time."""
        return random.Random(self._rng.getrandbits(64))

    def token_hex(self, random_bytes: int) -> str:
        """Unpredictable to the mesh, not to the seed."""
        return self._rng.randbytes(random_bytes).hex()


class SimulatedThreads:
    """Threads whose work takes a drawn time and is done all at once at its end. Cancelling who waits for it does not
    stop it, as no thread can be stopped."""

    def __init__(self, loop: VirtualLoop, node: Node, rng: random.Random) -> None:
        self._loop = loop
        self._node = node
        self._rng = rng

    async def run(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """The result of `function`."""
        done: asyncio.Future[Result] = self._loop.create_future()

        def work() -> None:
            try:
                result = function(*args, **kwargs)
            # Whatever it raised is raised where it is awaited.
            except BaseException as error:  # noqa: BLE001
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(result)

        self._loop.call_in(self._node, self._rng.uniform(SHORTEST_WORK_S, LONGEST_WORK_S), work)
        return await done

    def pool(self, threads: int, name: str) -> ThreadPool:
        """As the shared ones: there is always a free thread."""
        return SimulatedThreadPool(self)


class SimulatedThreadPool:
    """Threads of one owner."""

    def __init__(self, threads: SimulatedThreads) -> None:
        self._threads = threads
        self._is_closed = False

    async def run(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """The result of `function`. Raises RuntimeError once the pool is closed, as an executor does."""
        if self._is_closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        return await self._threads.run(function, *args, **kwargs)

    def close(self) -> None:
        """Begin nothing new."""
        self._is_closed = True


class SimulatedTransport:
    """gRPC over the simulated network."""

    identity = None

    def __init__(self, network: Network, node: Node, rng: random.Random) -> None:
        self._network = network
        self._node = node
        self._rng = rng

    def channel(
        self, address: str, options: Sequence[tuple[str, Any]], interceptors: Sequence[Any], role: str = ""
    ) -> SimulatedChannel:
        """A channel from this node. Nobody has an identity here, so any `role` answers."""
        return SimulatedChannel(self._network, self._node, self._rng, address, options, interceptors)

    def to_others(self) -> NoReturn:
        """Not simulated."""
        raise NotImplementedError("the simulated network has no TLS")

    def server(self, options: Sequence[tuple[str, Any]], interceptors: Sequence[Any]) -> SimulatedServer:
        """A server on this node."""
        return SimulatedServer(self._network, self._node, options, interceptors)

    def listen(self, server: grpc.aio.Server, bind: str) -> int:
        """At an address of this node."""
        return int(server.add_insecure_port(bind))


def simulated_runtime(network: Network, node: Node, wall: WallClock, seed: str, *, is_framed: bool = False) -> Runtime:
    """The seams of `node`; `seed` decides its chance, and is to be another one for each life of a process. `is_framed`:
    streams go in frames where they do on real networks."""
    loop = network.loop
    clock, entropy = SimulatedClock(loop, node, wall), SimulatedEntropy(random.Random(f"{seed}/entropy"))
    transport: Transport = SimulatedTransport(network, node, random.Random(f"{seed}/transport"))
    if is_framed:
        tokens = SimulatedEntropy(random.Random(f"{seed}/tickets"))
        rng = random.Random(f"{seed}/frames")
        transport = FramedOverNetwork(transport, network, node, clock, tokens, rng)
    return Runtime(clock, entropy, SimulatedThreads(loop, node, random.Random(f"{seed}/threads")), transport)
