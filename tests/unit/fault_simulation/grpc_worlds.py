"""Two worlds with gRPC: this machine's, with a proxy that can be stalled and broken, and a simulated one."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from fault_simulation.loop import VirtualLoop
from fault_simulation.network import Network
from fault_simulation.node import Node
from fault_simulation.runtime import SimulatedTransport
from mesh.runtime import GrpcTransport

Options = Sequence[tuple[str, Any]]


async def answer_of(call: Callable[[], Awaitable[bytes]]) -> bytes:
    """The answer of a call that goes over a new connection. grpc.aio ends the calls of a broken connection first and
    leaves it a moment later: a call in between still takes it, and fails as they did."""
    async with asyncio.timeout(5):
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            await asyncio.sleep(0.005)


class RealWorld:
    """grpc.aio on this machine. Addresses of servers are those of proxies."""

    def __init__(self) -> None:
        self._transport = GrpcTransport()
        self._proxies: list[_Proxy] = []
        self._servers: list[grpc.aio.Server] = []

    async def free_address(self) -> str:
        """Where nobody listens."""
        proxy = _Proxy(0)
        await proxy.start()
        await proxy.stop()
        return f"127.0.0.1:{proxy.port}"

    async def serve(self, server: grpc.aio.Server, address: str | None = None) -> str:
        """Start a server behind a proxy of its own."""
        host_port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        proxy = _Proxy(host_port)
        await proxy.start(int(address.rpartition(":")[2]) if address else 0)
        self._proxies.append(proxy)
        self._servers.append(server)
        return f"127.0.0.1:{proxy.port}"

    def new_server(self, options: Options = (), interceptors: Sequence[Any] = ()) -> grpc.aio.Server:
        return self._transport.server((("grpc.so_reuseport", 0), *options), interceptors)

    def channel(self, address: str, options: Options = (), interceptors: Sequence[Any] = ()) -> grpc.aio.Channel:
        return self._transport.channel(address, (("grpc.use_local_subchannel_pool", 1), *options), interceptors)

    def cut(self) -> None:
        for proxy in self._proxies:
            proxy.stall()

    def heal(self) -> None:
        for proxy in self._proxies:
            proxy.go_on()

    def break_connections(self) -> None:
        for proxy in self._proxies:
            proxy.reset()

    async def close(self) -> None:
        for server in self._servers:
            await server.stop(None)
        for proxy in self._proxies:
            await proxy.stop()

    def run(self, scenario: Callable[[Any], Awaitable[None]]) -> None:
        """Run a scenario here."""

        async def main() -> None:
            async with asyncio.timeout(60):
                try:
                    await scenario(self)
                finally:
                    await self.close()

        asyncio.run(main())


class SimulatedWorld:
    """A client and a server node."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.network = Network(self.loop, "7")
        self.client, self.host = Node("client", 1000.0), Node("server", 2000.0)
        self._client = SimulatedTransport(self.network, self.client, random.Random(8))
        self._server = SimulatedTransport(self.network, self.host, random.Random(9))
        self.network.hosts["server"] = "server"

    async def free_address(self) -> str:
        """Where nobody listens."""
        return "server:7001"

    async def serve(self, server: grpc.aio.Server, address: str | None = None) -> str:
        """Start a server."""
        port = server.add_insecure_port(address or "server:0")
        await server.start()
        return f"server:{port}"

    def new_server(self, options: Options = (), interceptors: Sequence[Any] = ()) -> grpc.aio.Server:
        return self._server.server(options, interceptors)

    def channel(self, address: str, options: Options = (), interceptors: Sequence[Any] = ()) -> grpc.aio.Channel:
        return self._client.channel(address, options, interceptors)

    def cut(self) -> None:
        self.network.cut("client", "server")
        self.network.cut("server", "client")

    def heal(self) -> None:
        self.network.heal_all()

    def break_connections(self) -> None:
        for endpoint in list(self.network._endpoints):
            endpoint.reset("reset")
            if endpoint.receiver is not None:
                endpoint.receiver.lost("reset")

    def run(self, scenario: Callable[[Any], Awaitable[None]]) -> None:
        """Run a scenario here."""

        async def main() -> None:
            async with asyncio.timeout(60):
                await scenario(self)

        self.loop.run(main())
        self.loop.close()
        # A servicer that raises is logged, not reported here; nothing else may go unheard.
        assert not self.loop.findings, self.loop.findings


class _Proxy:
    """Forwards bytes until told otherwise."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._way = asyncio.Event()
        self._way.set()
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self.go_on()
        self._server.close()
        self.reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stall(self) -> None:
        self._way.clear()

    def go_on(self) -> None:
        self._way.set()

    def reset(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._way.wait()
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers += [writer, back]
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._forward(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                await self._way.wait()
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.close()
