"""The life of every role: logs, metrics, store, gRPC server, membership, drain on SIGTERM."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Info, ProcessCollector

from mesh.announcement import Announcement
from mesh.audit.log import AuditLog
from mesh.audit.recorder import OrderRecorder
from mesh.backoff import Backoff
from mesh.errors import ConfigurationError
from mesh.exit_status import ExitStatus
from mesh.identity.tls import transport_of
from mesh.member_service import MemberService
from mesh.membership import FOLLOWED_AT_START, Directory, Member
from mesh.metric_families import metric_families
from mesh.parent_death import PARENT_VARIABLE, end_with_parent_if_asked
from mesh.rpc.framed.sockets import is_loopback
from mesh.rpc.framed.transport import FramedTransport
from mesh.rpc.metrics import RpcMetrics
from mesh.rpc.server import RpcServer
from mesh.runtime import Runtime, Transport, system_runtime
from mesh.shutdown import Shutdown
from mesh.store import open_store
from mesh.store.interface import StateStore
from mesh.tasks import TaskSet
from mesh.telemetry import MetricsPort, set_up_logs
from mesh.tracing import NO_TRACES, SpanExporter, Tracer
from penstock.v1 import member_pb2_grpc

log = logging.getLogger(__name__)

SERVER_GRACE_S = 1.0
WILDCARD_HOSTS = frozenset({"0.0.0.0", "::", "[::]"})
AUDIT_RETRY_S = 30.0
"""How long, at most, orders wait for another try at a state store that did not take them."""
HOST_CHECK_S = 5.0
"""How often a machine whose name gives its address asks whether it still does."""


@dataclass(frozen=True, slots=True)
class RoleSettings:
    """Settings that every role has."""

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
    frames_port: int = 0
    """Port that takes streams in frames from other hosts (docs/operations.md); 0 takes a free one, and none is taken
    where only this machine reaches the address."""
    metrics_port: int = 0
    """Port of the Prometheus endpoint, which also says at /ready whether the process serves; 0 takes a free one."""
    drain_s: float = 30.0
    """Seconds that running work is given after SIGTERM."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe record that is logged."""
    otlp_traces_endpoint: str = ""
    """URL of an OpenTelemetry collector that gets a span of every hop of a request, such as
    http://127.0.0.1:4318/v1/traces; needs the packages of penstock[tracing]. Empty: nothing is recorded."""
    identity: str = ""
    """Folder of this process's identity (ca.pem, cert.pem, key.pem), or one with a folder for each role; default:
    PENSTOCK_IDENTITY, then the local mesh's. With it all gRPC is mutual TLS (docs/security.md)."""
    insecure: bool = False
    """Listen on an address that others reach without an identity: anybody there may then order this process about."""
    otlp_traces_share: float = 1.0
    """Of the requests whose client sends no traceparent, how many are recorded: 0 to 1."""


@dataclass(frozen=True, slots=True)
class RoleContext:
    """Everything that a role is given at its start: its identity, store, directory, server, metrics and runtime."""

    role: str
    member_id: str
    incarnation_id: str
    address: str
    """host:port by which others reach this process, as of its start; its own record in the directory has the latest."""
    store: StateStore
    directory: Directory
    server: RpcServer
    registry: CollectorRegistry
    runtime: Runtime
    shutdown: Shutdown = field(default_factory=Shutdown)
    """By which the role may end its process in peace; to fail, see `Role.failed`."""
    tracer: Tracer = NO_TRACES
    bind_host: str = "127.0.0.1"
    """What this process listens on."""
    audit: AuditLog = field(default_factory=AuditLog)
    """Of orders that come in another way than by gRPC."""
    on_new_address: list[Callable[[str], None]] = field(default_factory=list)
    """Called with this process's own address where it has another one than at its start."""

    def is_own(self, member: Member) -> bool:
        """Whether this is the record of this very process."""
        own = (self.role, self.member_id, self.incarnation_id)
        return (member.role, member.member_id, member.incarnation_id) == own


class Role(Protocol):
    """One of the roles. `run_role_in` calls its methods in the order in which they stand here."""

    name: ClassVar[str]

    async def start(self, context: RoleContext) -> Mapping[str, str]:
        """Add servicers to `context.server` and start what runs in the background. Returns the attributes to
        announce. The process is announced, and its health set to serving, once this returns."""

    async def failed(self) -> None:
        """Return, or raise the reason, when the role cannot go on; the process then ends with status 1."""

    async def drain(self) -> None:
        """The process is to end: take nothing new and return when what runs has ended (cut after `drain_s`)."""

    async def stop(self) -> None:
        """Free everything; also called when `start` failed halfway."""


@dataclass(frozen=True, slots=True)
class RoleEnvironment:
    """What a process gives its role: the seams, the store and the signals to end. A simulation passes its own."""

    runtime: Runtime
    store: StateStore
    registry: CollectorRegistry
    metrics_address: str
    """host:port that the metrics are served at."""
    pid: int
    shutdown: Shutdown
    """By which the process is asked to end, from inside and outside."""
    supervised: bool
    """Whether the supervisor of `penstock up` starts it again."""
    exporter_of: Callable[[RoleSettings, str, str], SpanExporter | None] = lambda *_: None
    """Where spans go, by settings, role and incarnation; may raise ConfigurationError."""
    resolve_own_host: Callable[[], str] = lambda: socket.gethostbyname(socket.gethostname())
    """The address that this machine's name stands for now; may block, and raise OSError."""
    on_health: Callable[[str, bool], None] = lambda *_: None
    """Told each name's health as the process sets it."""


async def run_role(role: Role, settings: RoleSettings) -> int:
    """Run `role` in this process until it is asked to end or fails, or not at all with settings that are wrong; returns
    the `ExitStatus`. A second SIGTERM or SIGINT cuts a drain."""
    end_with_parent_if_asked()
    set_up_logs(role.name, settings.member_id, settings.log_level)
    shutdown, supervised = _shutdown_by_signals(), PARENT_VARIABLE in os.environ
    registry = CollectorRegistry()
    runtime = system_runtime(
        FramedTransport(_transport(role.name, settings), registry, frames_port=settings.frames_port)
    )
    ProcessCollector(registry=registry)
    metrics = MetricsPort(settings.bind_host, settings.metrics_port, registry)
    try:
        store = open_store(settings.store_url, runtime)
        try:
            environment = RoleEnvironment(
                runtime,
                store,
                registry,
                metrics.address,
                os.getpid(),
                shutdown,
                supervised,
                _otlp_exporter,
                on_health=metrics.set_health,
            )
            return await run_role_in(role, settings, environment)
        finally:
            await store.close()
    finally:
        metrics.close()
        log.info("ended")


def _transport(role: str, settings: RoleSettings) -> Transport:
    """Raises ConfigurationError."""
    transport = transport_of(settings.identity, role)
    own = transport.identity
    if own is not None and own.name not in ("", settings.member_id):
        raise ConfigurationError(
            f"{settings.identity} is the identity of {own}, and this process is {settings.member_id}"
        )
    if own is None and not settings.insecure and not is_loopback(settings.bind_host):
        raise ConfigurationError(
            f"--bind-host {settings.bind_host}: others reach this address, and without an identity anybody there may "
            "order this process about and read prompts. Give it one with --identity (`penstock ca issue` makes them), "
            "or say --insecure if the network itself keeps strangers out"
        )
    if own is None and not is_loopback(settings.bind_host):
        log.warning("no identity is asked for: anybody who reaches this address may order this process about")
    return transport


async def run_role_in(role: Role, settings: RoleSettings, environment: RoleEnvironment) -> ExitStatus:
    """Run a role from start to end in the given environment; returns the exit status. Raises `ConfigurationError` for a
    port that cannot be had."""
    runtime, registry, shutdown = environment.runtime, environment.registry, environment.shutdown
    bind, metrics = f"{settings.bind_host}:{settings.port}", RpcMetrics(registry)
    audit = AuditLog(role.name, settings.member_id)
    recorder = OrderRecorder(audit, runtime.clock.unix_s)
    server = RpcServer(runtime.transport, bind, metrics=metrics, watchers=(recorder,), on_health=environment.on_health)
    directory = Directory(environment.store, FOLLOWED_AT_START.get(role.name))
    host, tasks = _advertised_host(settings, environment), TaskSet("membership")
    incarnation_id, tracer = runtime.entropy.token_hex(8), NO_TRACES
    try:
        exporter = environment.exporter_of(settings, role.name, incarnation_id)
        tracer = Tracer(exporter, runtime.clock, runtime.entropy, settings.otlp_traces_share)
    except ConfigurationError as error:
        log.error("the role cannot run with its settings", extra={"error": str(error)})
        return ExitStatus.WRONG_SETTINGS
    context = RoleContext(
        role=role.name,
        member_id=settings.member_id,
        incarnation_id=incarnation_id,
        address=_at(host, server.address),
        store=environment.store,
        directory=directory,
        server=server,
        registry=registry,
        runtime=runtime,
        shutdown=shutdown,
        tracer=tracer,
        bind_host=settings.bind_host,
        audit=audit,
    )
    service = MemberService(
        role.name,
        settings.member_id,
        context.incarnation_id,
        settings.drain_s,
        shutdown,
        environment.supervised,
        lambda prefix: runtime.threads.run(metric_families, registry, prefix, settings.member_id),
    )
    server.add(member_pb2_grpc.add_MemberServicer_to_server, service, "penstock.v1.Member")
    try:
        await _unless_asked_to_end(directory.start(), shutdown)
        tasks.spawn(audit.write(environment.store, Backoff(longest_s=AUDIT_RETRY_S)), name="write the audit log")
        attributes = {"pid": str(environment.pid), **await role.start(context)}
        await server.start()
        announcement = await _announce(context, _at(host, environment.metrics_address), attributes)
        if (settings.advertise_host or settings.bind_host) in WILDCARD_HOSTS:
            tasks.spawn(_follow_own_host(announcement, environment, context.on_new_address), name="own host")
        await server.set_serving(True)
        status = await _until_asked_to_end(role, shutdown, announcement)
        await server.set_serving(False)
        await announcement.withdraw()
        if status is not ExitStatus.FAILED:
            await _drain(role, settings.drain_s if shutdown.drain_s is None else shutdown.drain_s, shutdown.cut_asked)
        return status
    except _AskedToEndEarly:
        log.warning("asked to end before the state store was there")
        return shutdown.status
    except ConfigurationError as error:
        log.error("the role cannot run with its settings", extra={"error": str(error)})
        return ExitStatus.WRONG_SETTINGS
    except Exception:
        log.exception("the role cannot run")
        return ExitStatus.FAILED
    finally:
        await tasks.cancel()
        await audit.flush(environment.store)
        await role.stop()
        await directory.stop()
        await server.stop(SERVER_GRACE_S)
        if tracer.is_on:
            await runtime.threads.run(tracer.close)


def _otlp_exporter(settings: RoleSettings, role: str, incarnation_id: str) -> SpanExporter | None:
    if not settings.otlp_traces_endpoint:
        return None
    if not settings.otlp_traces_endpoint.startswith(("http://", "https://")):
        raise ConfigurationError(
            f"--otlp-traces-endpoint {settings.otlp_traces_endpoint}: give a URL such as "
            "http://127.0.0.1:4318/v1/traces (OTLP over HTTP)"
        )
    if not 0 <= settings.otlp_traces_share <= 1:
        raise ConfigurationError(f"--otlp-traces-share {settings.otlp_traces_share:g}: give a share from 0 to 1")
    from mesh.otlp import OtlpExporter

    return OtlpExporter(settings.otlp_traces_endpoint, role, settings.member_id, incarnation_id)


class _AskedToEndEarly(Exception):
    """Before the process was a member."""


async def _unless_asked_to_end(work: Coroutine[Any, Any, None], shutdown: Shutdown) -> None:
    """Do what waits for the state store as long as that is away. Raises `_AskedToEndEarly`: a process whose store never
    comes back has to end all the same."""
    working = asyncio.create_task(work)
    asked = asyncio.create_task(shutdown.asked.wait())
    try:
        await asyncio.wait((working, asked), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _AskedToEndEarly
        working.result()
    finally:
        for task in (working, asked):
            task.cancel()
        await asyncio.wait((working, asked))


def _shutdown_by_signals() -> Shutdown:
    shutdown = Shutdown()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, shutdown.on_signal)
    return shutdown


def _advertised_host(settings: RoleSettings, environment: RoleEnvironment) -> str:
    host = settings.advertise_host or settings.bind_host
    return environment.resolve_own_host() if host in WILDCARD_HOSTS else host


def _at(host: str, address: str) -> str:
    return f"{host}:{address.rpartition(':')[2]}"


async def _follow_own_host(
    announcement: Announcement, environment: RoleEnvironment, on_new_address: list[Callable[[str], None]]
) -> None:
    """Announce every address of this process anew when its machine's name stands for another one: for ever."""
    while True:
        await asyncio.sleep(HOST_CHECK_S)
        member = announcement.member
        former = member.address.rpartition(":")[0]
        try:
            host = await environment.runtime.threads.run(environment.resolve_own_host)
        except OSError as error:
            log.warning("this machine's name cannot be resolved", extra={"kept": former, "error": str(error)})
            continue
        if host != former:
            log.warning("this machine has another address", extra={"host": host, "former": former})
            announcement.change(_rehosted(member, former, host))
            for told in on_new_address:
                told(announcement.member.address)


def _rehosted(member: Member, former: str, host: str) -> Member:
    """Whatever stood as an address at the former host is at the new one."""
    attributes = {
        name: _at(host, value) if value.rpartition(":")[0] == former else value
        for name, value in member.attributes.items()
    }
    return replace(
        member,
        address=_at(host, member.address),
        metrics_address=_at(host, member.metrics_address),
        attributes=attributes,
    )


def register_member_metrics(context: RoleContext) -> Counter:
    """What every role exports of its membership; the counter is of its records written, by reason."""
    Info("penstock_member", "Who this process is", registry=context.registry).info(
        {"role": context.role, "member_id": context.member_id, "incarnation_id": context.incarnation_id}
    )
    missing = Gauge(
        "penstock_missing_members",
        "Members whose record is gone from the store, given time to announce themselves again",
        registry=context.registry,
    )
    missing.set_function(lambda: context.directory.missing)
    return Counter(
        "penstock_member_announcements", "Records written of this member, by why", ["reason"], registry=context.registry
    )


async def _announce(context: RoleContext, metrics_address: str, attributes: Mapping[str, str]) -> Announcement:
    member = Member(
        role=context.role,
        member_id=context.member_id,
        incarnation_id=context.incarnation_id,
        address=context.address,
        metrics_address=metrics_address,
        attributes=attributes,
    )
    written = register_member_metrics(context)
    announcement = Announcement(context.store, member, lambda reason: written.labels(reason).inc())
    try:
        await _unless_asked_to_end(announcement.start(), context.shutdown)
    except _AskedToEndEarly:
        await announcement.withdraw()
        raise
    serving = {"address": context.address, "metrics_address": metrics_address, "incarnation_id": context.incarnation_id}
    log.info("serving", extra=serving)
    return announcement


async def _until_asked_to_end(role: Role, shutdown: Shutdown, announcement: Announcement) -> ExitStatus:
    """FAILED when the role failed by itself, SUPERSEDED when another process has taken its name."""
    asked = asyncio.create_task(shutdown.asked.wait())
    failed = asyncio.create_task(role.failed())
    superseded = asyncio.create_task(announcement.wait_superseded())
    await asyncio.wait((asked, failed, superseded), return_when=asyncio.FIRST_COMPLETED)
    if superseded.done():
        shutdown.ask(ExitStatus.SUPERSEDED)
    for task in (asked, superseded):
        task.cancel()
    if failed.done():
        log.critical("the role failed and its process ends", exc_info=failed.exception())
        return ExitStatus.FAILED
    failed.cancel()
    return shutdown.status


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
