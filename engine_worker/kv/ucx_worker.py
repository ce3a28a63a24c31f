"""UCX on an asyncio event loop: endpoints whose operations are futures.

ucxx's own asyncio layer was tried first. Each of its awaits polls (`sleep(0)` until the request is complete), so an
agent that listens for its peers takes a core, and its blocking mode is armed once and never again (0.52). So this
uses ucxx.libucxx, the layer below it, and arms UCX's event descriptor whenever there is nothing left to do: 0.0 %
CPU with receives outstanding.
"""

import asyncio
import importlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from engine_worker.kv.devices import Device, changes, ipv4_devices, lost
from engine_worker.kv.fabric import KvEndpoint, KvFabric
from engine_worker.kv.memory import Buffer
from engine_worker.kv.settings import KvTransferSettings
from engine_worker.kv.ucx_environment import load_ucx
from mesh.errors import ConfigurationError, PeerUnavailable

_routed: list[Mapping[str, Device]] = []
"""The devices at UCX's first connection: one entry from then on."""


def ucx_fabric(settings: KvTransferSettings) -> KvFabric:
    """UCX, loaded when this is first called; on the event loop that is to use it. Raises `ConfigurationError` where it
    is not installed."""
    return UcxWorker(load_ucx(settings.device), spin_us=settings.spin_us)


class UcxWorker:
    """The `KvFabric` over UCX: one UCX worker, progressed by the event loop that made it."""

    def __init__(self, ucx: ModuleType, *, spin_us: float) -> None:
        """`spin_us`: how long to look for more while data is under way before the loop sleeps."""
        self.ucx = ucx
        # The type that requests take their buffers in; ucxx exports it under no public name.
        self.array_type: Callable[[Buffer], Any] = importlib.import_module("ucxx._lib.arr").Array
        self._loop = asyncio.get_running_loop()
        self._spin_s = spin_us * 1e-6
        self._devices = ipv4_devices()
        """Those that the context knows: it finds them when it is made, and once only."""
        context = ucx.libucxx.UCXContext({})
        self._worker = ucx.libucxx.UCXWorker(context, enable_delayed_submission=False, enable_python_future=False)
        self._worker.init_blocking_progress_mode()
        self._descriptor: int = self._worker.epoll_file_descriptor
        self._loop.add_reader(self._descriptor, self._run)
        self._pending: dict[Any, tuple[asyncio.Future[None], Any]] = {}
        """By request: its future, and the buffer, which must live as long as the request."""
        self._data_pending = 0
        self._busy_until_s = 0.0
        self._is_scheduled = False
        self._is_closed = False

    def listen(self, port: int, accept: Callable[[KvEndpoint], None]) -> Any:
        """Call `accept` for each peer that connects. Returns the listener, which has a `port` and listens as long
        as it is referred to. Raises `ConfigurationError` if the port is taken."""

        def connected(endpoint: Any) -> None:
            _note_routes()
            self._loop.call_soon(accept, UcxEndpoint(self, endpoint))

        try:
            return self.ucx.libucxx.UCXListener.create(
                worker=self._worker, port=port, cb_func=connected, deliver_endpoint=True
            )
        except self.ucx.exceptions.UCXError as error:
            raise ConfigurationError(f"UCX cannot listen on port {port} ({error}): is it taken?") from error

    async def connect(self, host: str, port: int) -> KvEndpoint:
        try:
            found = await self._loop.getaddrinfo(host, port, family=socket.AF_INET, type=socket.SOCK_STREAM)
        except OSError as error:
            raise PeerUnavailable(f"the KV agent at {host}:{port} has no address: {error}") from error
        address = str(found[0][4][0])
        _note_routes()
        try:
            endpoint = self.ucx.libucxx.UCXEndpoint.create(self._worker, address, port, True)
        except self.ucx.exceptions.UCXError as error:
            raise PeerUnavailable(f"UCX cannot connect to {address}:{port}: {error}") from error
        return UcxEndpoint(self, endpoint)

    def staleness(self) -> str:
        return changes(self._devices, ipv4_devices())

    def obstacle(self) -> str:
        """See `KvFabric`. UCX (1.19, 1.20) reads the routes of all devices at its first connection, by their indices,
        and never again in the life of the process. A device that was made anew has another index and so, for UCX, no
        route; the peer hears of it as "length mismatch", while connections to old peers and to itself go on as ever.
        Another context was tried: it changes nothing."""
        if not _routed:
            return ""
        lost_devices = lost(_routed[0], ipv4_devices())
        return f"{lost_devices}, and UCX reads routes but once: restart the worker" if lost_devices else ""

    def submit(self, request: Any, buffer: Any, *, is_data: bool = False) -> asyncio.Future[None]:
        """A future for a request. It fails with `ConnectionError`, and must not be cancelled: UCX would go on."""
        future: asyncio.Future[None] = self._loop.create_future()
        if is_data:
            self._data_pending += 1
            self._busy_until_s = time.perf_counter() + self._spin_s
            future.add_done_callback(self._data_done)
        self._pending[request] = (future, buffer)
        self.wake()
        return future

    def wake(self) -> None:
        """Progress soon: what was begun or closed may be complete, and the descriptor is to be armed again."""
        if not self._is_scheduled and not self._is_closed:
            self._is_scheduled = True
            self._loop.call_soon(self._run)

    async def close(self) -> None:
        """After all endpoints; returns when no buffer is touched any more."""
        while self._pending:
            await asyncio.wait([future for future, _ in self._pending.values()])
        self._is_closed = True
        self._loop.remove_reader(self._descriptor)

    def _data_done(self, future: asyncio.Future[None]) -> None:
        self._data_pending -= 1

    def _run(self) -> None:
        """One turn. While data is under way there is another one soon, but never a loop in here: whoever waited for
        what is complete may have to answer before more can come, and gets there only in turns of the event loop."""
        self._is_scheduled = False
        if self._is_closed:
            return
        now_s = time.perf_counter()
        if self._worker.progress_once():
            self._worker.progress()
            self._busy_until_s = time.perf_counter() + self._spin_s
        self._settle()
        if self._data_pending and now_s < self._busy_until_s:
            # Where the peer runs on the same core it would otherwise not get on before we sleep.
            os.sched_yield()
            self.wake()
        elif not self._worker.arm():
            self.wake()

    def _settle(self) -> None:
        """Complete the futures of completed requests."""
        completed = [request for request in self._pending if request.completed]
        for request in completed:
            future, _ = self._pending.pop(request)
            if future.cancelled():
                continue  # the event loop is being closed under it
            try:
                request.check_error()
            except self.ucx.exceptions.UCXError as error:
                future.set_exception(ConnectionError(str(error)))
                future.exception()  # of many that fail together, only one is awaited
            else:
                future.set_result(None)


def _note_routes() -> None:
    """UCX is about to read its routes, or has done so before."""
    if not _routed:
        _routed.append(ipv4_devices())


class UcxEndpoint:
    """A connection. After `close`, each operation still completes, with an error unless it was complete before;
    only then is its buffer no longer touched (measured: UCX writes between the two)."""

    def __init__(self, worker: UcxWorker, endpoint: Any) -> None:
        self._worker = worker
        self._endpoint = endpoint
        self._is_closed = False

    def send(self, buffer: Buffer, tag: int, *, is_data: bool = False) -> asyncio.Future[None]:
        """Done when the buffer may be used again."""
        return self._begin("tag_send", buffer, tag, is_data)

    def receive(self, buffer: Buffer, tag: int, *, is_data: bool = False) -> asyncio.Future[None]:
        """A message of this tag, which may be shorter than the buffer."""
        return self._begin("tag_recv", buffer, tag, is_data)

    def send_stream(self, buffer: Buffer) -> asyncio.Future[None]:
        """Send bytes on the endpoint's ordered stream."""
        return self._begin("stream_send", buffer, None, False)

    def receive_stream(self, buffer: Buffer) -> asyncio.Future[None]:
        """Exactly as many bytes as the buffer has."""
        return self._begin("stream_recv", buffer, None, False)

    def close(self) -> None:
        """Close at once; messages under way are lost."""
        if not self._is_closed:
            self._is_closed = True
            self._endpoint.close_blocking(period=10**8, max_attempts=1)
            # An endpoint keeps the listener that it came from, and with it the port.
            self._endpoint = None
            self._worker.wake()

    def _begin(self, name: str, buffer: Buffer, tag: int | None, is_data: bool) -> asyncio.Future[None]:
        ucx = self._worker.ucx
        # When the peer is lost, UCXX cancels what was begun, once; what began after that, before anyone here has
        # heard of the loss, would never end. Both happen in turns of one event loop, so asking first is enough.
        if self._is_closed:
            return _failed("the connection was closed")
        if not self._endpoint.alive:
            return _failed("the peer is gone")
        try:
            array, operation = self._worker.array_type(buffer), getattr(self._endpoint, name)
            request = operation(array) if tag is None else operation(array, ucx.types.Tag(tag))
            return self._worker.submit(request, (array, buffer), is_data=is_data)
        except ucx.exceptions.UCXError as error:
            return _failed(f"{error}")


def _failed(reason: str) -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.set_exception(ConnectionError(reason))
    future.exception()
    return future
