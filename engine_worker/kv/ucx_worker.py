"""UCX on an asyncio event loop: endpoints whose operations are futures.

ucxx's own asyncio layer was tried first. Each of its awaits polls (`sleep(0)` until the request is complete), so an
agent that listens for its peers takes a core, and its blocking mode is armed once and never again (0.52). So this
uses ucxx.libucxx, the layer below it, and arms UCX's event descriptor whenever there is nothing left to do: 0.0 %
CPU with receives outstanding.
"""

import asyncio
import importlib
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from engine_worker.kv.addresses import loopback_obstacle, numeric_host, ucx_network
from engine_worker.kv.devices import Device, changes, device_addresses, ipv4_devices, lost, rdma_devices
from engine_worker.kv.fabric import KvEndpoint, KvFabric
from engine_worker.kv.listening import move_listener
from engine_worker.kv.memory import Buffer
from engine_worker.kv.settings import KvTransferSettings
from engine_worker.kv.ucx_environment import load_ucx, shared_memory_transports
from mesh.errors import ConfigurationError, PeerUnavailable

log = logging.getLogger(__name__)

_JAM_S: Final = 0.5
"""How long a message of a process to itself, which takes microseconds, is waited for."""
_JAM_TURN_S: Final = 0.005
_JAM_TURNS: Final = 50
"""As many at least, because on a busy machine one may take half a second."""
_JAM_TAG: Final = 0
"""The key of a connection is drawn, and 0 with a chance of 2**-44."""
ABANDONED_S: Final = 1.0
"""After an endpoint was closed. UCX ends what it was doing within milliseconds, or not at all."""

_routed: list[Mapping[str, Device]] = []
"""The devices at UCX's first connection: one entry from then on."""


def ucx_fabric(settings: KvTransferSettings) -> KvFabric:
    """UCX, loaded when this is first called; on the event loop that is to use it. Raises `ConfigurationError` where it
    is not installed, or this machine has not the address that it is to listen on."""
    host = numeric_host(settings.host)
    addresses = device_addresses()
    if reason := loopback_obstacle(host, addresses):
        log.warning("peers will not get any KV from here", extra={"reason": reason})
    network = ucx_network(host, settings.port, addresses, rdma_devices(), os.environ)
    return UcxWorker(load_ucx(settings.device), host, network, spin_us=settings.spin_us)


@dataclass(frozen=True, slots=True, eq=False)
class _Operation:
    future: asyncio.Future[None]
    buffer: Any
    """Lives as long as the request."""
    endpoint: KvEndpoint
    is_send: bool


class UcxWorker:
    """The `KvFabric` over UCX: one UCX worker, progressed by the event loop that made it."""

    def __init__(self, ucx: ModuleType, host: str, network: Mapping[str, str], *, spin_us: float) -> None:
        """`host`: the numeric address to listen on. `network`: UCX's settings of devices, ports and address families.
        `spin_us`: how long to look for more while data is under way before the loop sleeps. Raises `ConfigurationError`
        if UCX cannot work with them."""
        self.ucx = ucx
        self._host = host
        self._used_devices = network.get("NET_DEVICES")
        # The type that requests take their buffers in; ucxx exports it under no public name.
        self.array_type: Callable[[Buffer], Any] = importlib.import_module("ucxx._lib.arr").Array
        self._loop = asyncio.get_running_loop()
        self._spin_s = spin_us * 1e-6
        self._devices = ipv4_devices(self._used_devices)
        """Those that the context knows: it finds them when it is made, and once only."""
        try:
            context = ucx.libucxx.UCXContext(dict(network))
            self._worker = ucx.libucxx.UCXWorker(context, enable_delayed_submission=False, enable_python_future=False)
        except ucx.exceptions.UCXError as error:
            raise ConfigurationError(f"UCX cannot start with {dict(network)} ({error}): is the port taken?") from error
        self._worker.init_blocking_progress_mode()
        self._descriptor: int = self._worker.epoll_file_descriptor
        self._loop.add_reader(self._descriptor, self._run)
        self._pending: dict[Any, _Operation] = {}
        """By request."""
        self._abandoned: list[tuple[Any, Any]] = []
        """Requests that UCX has not ended, and their buffers, which it may still read."""
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
            listener = self.ucx.libucxx.UCXListener.create(
                worker=self._worker, port=0, cb_func=connected, deliver_endpoint=True
            )
        except self.ucx.exceptions.UCXError as error:
            raise ConfigurationError(f"UCX cannot listen ({error})") from error
        return UcxListener(listener, move_listener(listener.port, self._host, port))

    async def connect(self, host: str, port: int) -> KvEndpoint:
        try:
            found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise PeerUnavailable(f"the KV agent at {host}:{port} has no address: {error}") from error
        address = str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])
        _note_routes()
        try:
            endpoint = self.ucx.libucxx.UCXEndpoint.create(self._worker, address, port, True)
        except self.ucx.exceptions.UCXError as error:
            raise PeerUnavailable(f"UCX cannot connect to {address}:{port}: {error}") from error
        return UcxEndpoint(self, endpoint)

    def staleness(self) -> str:
        return changes(self._devices, ipv4_devices(self._used_devices))

    async def jam(self) -> str:
        """See `KvFabric.jam`. All that a machine's peers send to a process goes through one queue of shared memory (of
        each kind): a peer takes a place in it, then fills it. One that is killed in between leaves a place that is
        never filled, and UCX (1.21) reads no further, for ever. Another worker of this process sends a message
        the same way, to see whether it arrives."""
        for transport in shared_memory_transports(os.environ.get("UCX_TLS", "all")):
            if not await self._arrives_by(transport):
                return f"nothing arrives through shared memory ({transport}) since a peer died while it sent"
        return ""

    async def _arrives_by(self, transport: str) -> bool:
        ucx, loop = self.ucx.libucxx, self._loop
        try:
            context = ucx.UCXContext({"TLS": transport})
            sender = ucx.UCXWorker(context, enable_delayed_submission=False, enable_python_future=False)
            address = ucx.UCXAddress.create_from_worker(self._worker)
            endpoint = ucx.UCXEndpoint.create_from_worker_address(sender, address, True)
        except self.ucx.exceptions.UCXError:
            return True  # there is no such memory on this machine, or no room in it, so no peer uses it
        message, tag = self.array_type(bytearray(1)), self.ucx.types.Tag(_JAM_TAG)
        ends_s, turns = loop.time() + _JAM_S, 0
        try:
            endpoint.tag_send(message, tag)
            while loop.time() < ends_s or turns < _JAM_TURNS:
                sender.progress()
                self._worker.progress()
                if self._worker.tag_probe(tag).matched:
                    self._worker.tag_recv(message, tag)
                    return True
                await asyncio.sleep(_JAM_TURN_S)
                turns += 1
            return False
        except self.ucx.exceptions.UCXError as error:
            log.warning("whether messages of this machine's peers arrive is not known", extra={"reason": str(error)})
            return True
        finally:
            endpoint.close_blocking(period=10**8, max_attempts=1)
            self.wake()

    def obstacle(self) -> str:
        """See `KvFabric`. UCX (1.19, 1.20) reads the routes of all devices at its first connection, by their indices,
        and never again in the life of the process. A device that was made anew has another index and so, for UCX, no
        route; the peer hears of it as "length mismatch", while connections to old peers and to itself go on as ever.
        Another context was tried: it changes nothing."""
        if not _routed:
            return ""
        used = self._used_devices.split(",") if self._used_devices else list(_routed[0])
        routed = {name: device for name, device in _routed[0].items() if name in used}
        lost_devices = lost(routed, ipv4_devices(self._used_devices))
        return f"{lost_devices}, and UCX reads routes but once: restart the worker" if lost_devices else ""

    def submit(
        self, request: Any, buffer: Any, endpoint: KvEndpoint, *, is_data: bool, is_send: bool
    ) -> asyncio.Future[None]:
        """A future for a request. It fails with `ConnectionError`, and must not be cancelled: UCX would go on."""
        future: asyncio.Future[None] = self._loop.create_future()
        if is_data:
            self._data_pending += 1
            self._busy_until_s = time.perf_counter() + self._spin_s
            future.add_done_callback(self._data_done)
        self._pending[request] = _Operation(future, buffer, endpoint, is_send)
        self.wake()
        return future

    def closed(self, endpoint: KvEndpoint) -> None:
        """Its operations are about to end. Once, in thousands of transfers whose peer was stopped in the midst, those
        that sent did not, and whoever waited for them waited for ever."""
        self.wake()
        self._loop.call_later(ABANDONED_S, self._abandon, endpoint)

    def _abandon(self, endpoint: KvEndpoint) -> None:
        """Wait no longer for what a closed endpoint was sending: it is read at most, and nobody takes it for whole.
        What it was receiving may still be written to, and is waited for."""
        late = [
            request
            for request, operation in self._pending.items()
            if operation.endpoint is endpoint and operation.is_send and not request.completed
        ]
        for request in late:
            operation = self._pending.pop(request)
            self._abandoned.append((request, operation.buffer))
            _fail(operation.future, "the connection was closed, and UCX did not end what it was sending")
        if late:
            log.error("UCX does not end what a closed connection was sending", extra={"messages": len(late)})

    def wake(self) -> None:
        """Progress soon: what was begun or closed may be complete, and the descriptor is to be armed again."""
        if not self._is_scheduled and not self._is_closed:
            self._is_scheduled = True
            self._loop.call_soon(self._run)

    async def close(self) -> None:
        """After all endpoints; returns when no buffer is touched any more."""
        while self._pending:
            await asyncio.wait([operation.future for operation in self._pending.values()])
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
            future = self._pending.pop(request).future
            if future.cancelled():
                continue  # the event loop is being closed under it
            try:
                request.check_error()
            except self.ucx.exceptions.UCXError as error:
                _fail(future, str(error))
            else:
                future.set_result(None)


class UcxListener:
    """Accepts connections for as long as it is referred to."""

    def __init__(self, listener: Any, port: int) -> None:
        """`port`: where UCX's listener is by now, which it does not know itself."""
        self._listener = listener
        self.port = port


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
            self._worker.closed(self)

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
            is_send = name.endswith("send")
            return self._worker.submit(request, (array, buffer), self, is_data=is_data, is_send=is_send)
        except ucx.exceptions.UCXError as error:
            return _failed(f"{error}")


def _failed(reason: str) -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    _fail(future, reason)
    return future


def _fail(future: asyncio.Future[None], reason: str) -> None:
    future.set_exception(ConnectionError(reason))
    future.exception()  # of many that fail together, only one is awaited
