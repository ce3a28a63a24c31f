"""The life of every role: logs, metrics, store, gRPC server, membership, drain on SIGTERM."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Info, ProcessCollector

from mesh.announcement import Announcement
from mesh.errors import ConfigurationError
from mesh.membership import Directory, Member
from mesh.parent_death import end_with_parent_if_asked
from mesh.rpc.metrics import RpcMetrics
from mesh.rpc.server import RpcServer
from mesh.runtime import Runtime, system_runtime
from mesh.store import open_store
from mesh.store.interface import StateStore
from mesh.telemetry import MetricsPort, set_up_logs

log = logging.getLogger(__name__)

EXIT_WRONG_SETTINGS = 2
EXIT_SUPERSEDED = 3
"""Another process has taken this one's name: to start this one again would take the name back."""
SERVER_GRACE_S = 1.0
WILDCARD_HOSTS = frozenset({"0.0.0.0", "::", "[::]"})


@dataclass(frozen=True, slots=True)
class RoleSettings:
    """What every role is told, whatever it does."""

    store_url: str
    """State store: etcd://HOST:PORT[,HOST:PORT], penstock://HOST:PORT or embedded:"""
    member_id: str
    """Name of this process in the mesh, unique within its role; it stays the same over restarts."""
    bind_host: str = "127.0.0.1"
    """Address to listen on."""
    advertise_host: str = ""
    """Host by which others reach this process; empty: the address it listens on, or that of this machine's name if
    it listens on all."""
    port: int = 0
    """Port of the gRPC server; 0 takes a free one."""
    metrics_port: int = 0
    """Port of the Prometheus endpoint; 0 takes a free one."""
    drain_s: float = 30.0
    """Seconds that running work is given after SIGTERM."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe record that is logged."""


@dataclass(frozen=True, slots=True)
class RoleContext:
    """What a role is given to work with."""

    role: str
    member_id: str
    incarnation_id: str
    address: str
    """host:port by which others reach this process."""
    store: StateStore
    directory: Directory
    server: RpcServer
    registry: CollectorRegistry
    runtime: Runtime


class Role(Protocol):
    """One of the seven roles. `live` calls its methods in the order in which they stand here."""

    name: ClassVar[str]

    async def start(self, context: RoleContext) -> Mapping[str, str]:
        """Add servicers to `context.server` and start what runs in the background. Returns the attributes to
        announce. The process is announced, and its health set to serving, once this returns."""

    async def failed(self) -> None:
        """Return, or raise the reason, when the role cannot go on; the process then ends with status 1."""

    async def drain(self) -> None:
        """SIGTERM arrived: take nothing new and return when what runs has ended (cut after `drain_s`)."""

    async def stop(self) -> None:
        """Free everything; also called when `start` failed halfway."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the life of a role takes from its process. Whoever makes them closes them."""

    runtime: Runtime
    store: StateStore
    registry: CollectorRegistry
    metrics_address: str
    """host:port that the metrics are served at."""
    pid: int
    stop_asked: asyncio.Event
    """Drain and end."""
    cut_asked: asyncio.Event
    """Drain no longer."""


async def run_role(role: Role, settings: RoleSettings) -> int:
    """Run `role` in this process until SIGTERM or SIGINT (exit status 0), until it fails (1) or another process takes
    its name (3), or not at all with settings that are wrong (2); a second signal cuts a drain."""
    end_with_parent_if_asked()
    set_up_logs(role.name, settings.member_id, settings.log_level)
    stop_asked, cut_asked = _signals()
    runtime, registry = system_runtime(), CollectorRegistry()
    ProcessCollector(registry=registry)
    metrics = MetricsPort(settings.bind_host, settings.metrics_port, registry)
    try:
        store = open_store(settings.store_url)
        try:
            surroundings = Surroundings(runtime, store, registry, metrics.address, os.getpid(), stop_asked, cut_asked)
            return await live(role, settings, surroundings)
        finally:
            await store.close()
    finally:
        metrics.close()
        log.info("ended")


async def live(role: Role, settings: RoleSettings, surroundings: Surroundings) -> int:
    """The whole life of a role, wherever it is lived; returns the exit status as of `run_role`. Raises
    `ConfigurationError` for a port that cannot be had."""
    runtime, registry = surroundings.runtime, surroundings.registry
    server = RpcServer(runtime.transport, f"{settings.bind_host}:{settings.port}", metrics=RpcMetrics(registry))
    directory = Directory(surroundings.store)
    context = RoleContext(
        role=role.name,
        member_id=settings.member_id,
        incarnation_id=runtime.entropy.token_hex(8),
        address=_advertised(server.address, settings),
        store=surroundings.store,
        directory=directory,
        server=server,
        registry=registry,
        runtime=runtime,
    )
    try:
        await directory.start()
        attributes = {"pid": str(surroundings.pid), **await role.start(context)}
        await server.start()
        announcement = await _announce(context, _advertised(surroundings.metrics_address, settings), attributes)
        await server.set_serving(True)
        status = await _until_stopped(role, surroundings.stop_asked, announcement)
        await server.set_serving(False)
        await announcement.withdraw()
        if status in (0, EXIT_SUPERSEDED):
            await _drain(role, settings.drain_s, surroundings.cut_asked)
        return status
    except ConfigurationError as error:
        log.error("the role cannot run with its settings", extra={"error": str(error)})
        return EXIT_WRONG_SETTINGS
    except Exception:
        log.exception("the role cannot run")
        return 1
    finally:
        await role.stop()
        await directory.stop()
        await server.stop(SERVER_GRACE_S)


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Events of the first and of the second SIGTERM or SIGINT."""
    stop_asked, cut_asked = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (cut_asked if stop_asked.is_set() else stop_asked).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stop_asked, cut_asked


def _advertised(address: str, settings: RoleSettings) -> str:
    host = settings.advertise_host or settings.bind_host
    if host in WILDCARD_HOSTS:
        host = socket.gethostbyname(socket.gethostname())
    return f"{host}:{address.rpartition(':')[2]}"


async def _announce(context: RoleContext, metrics_address: str, attributes: Mapping[str, str]) -> Announcement:
    Info("penstock_member", "Who this process is", registry=context.registry).info(
        {"role": context.role, "member_id": context.member_id, "incarnation_id": context.incarnation_id}
    )
    member = Member(
        role=context.role,
        member_id=context.member_id,
        incarnation_id=context.incarnation_id,
        address=context.address,
        metrics_address=metrics_address,
        attributes=attributes,
    )
    written = Counter(
        "penstock_member_announcements", "Records written of this member, by why", ["reason"], registry=context.registry
    )
    missing = Gauge(
        "penstock_missing_members",
        "Members whose record is gone from the store, given time to announce themselves again",
        registry=context.registry,
    )
    missing.set_function(lambda: context.directory.missing)
    announcement = Announcement(context.store, member, lambda reason: written.labels(reason).inc())
    await announcement.start()
    log.info("serving", extra={"address": context.address, "metrics_address": metrics_address})
    return announcement


async def _until_stopped(role: Role, stop_asked: asyncio.Event, announcement: Announcement) -> int:
    """0 when asked to stop, 1 when the role failed by itself, 3 when another process has taken its name."""
    stop = asyncio.create_task(stop_asked.wait())
    failed = asyncio.create_task(role.failed())
    superseded = asyncio.create_task(announcement.wait_superseded())
    await asyncio.wait((stop, failed, superseded), return_when=asyncio.FIRST_COMPLETED)
    for task in (stop, superseded):
        task.cancel()
    if failed.done():
        log.critical("the role failed and its process ends", exc_info=failed.exception())
        return 1
    failed.cancel()
    return EXIT_SUPERSEDED if superseded.done() and not stop.done() else 0


async def _drain(role: Role, drain_s: float, cut_asked: asyncio.Event) -> None:
    log.info("draining", extra={"drain_s": drain_s})
    drain = asyncio.create_task(role.drain())
    cut = asyncio.create_task(cut_asked.wait())
    await asyncio.wait((drain, cut), timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
    cut.cancel()
    if not drain.done():
        drain.cancel()
        log.warning("the drain was cut; running requests are ended")
    elif (error := drain.exception()) is not None:
        log.error("the drain failed", exc_info=error)
