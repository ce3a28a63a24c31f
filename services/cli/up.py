"""`penstock up`: a whole mesh on this machine, supervised until Ctrl-C."""

import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import click

from controlplane.deployment.gpus import GpuPool
from controlplane.deployment.replicas import cores_of
from controlplane.policies.registry import DEFAULT_POLICY, create_policy
from engine_worker.checkpoint_source import locate_checkpoint
from engine_worker.engine_choice import ENGINES
from engine_worker.host_tier.settings import directory_of_mesh, host_tier_settings
from engine_worker.host_tier.shared_memory import remove_stores
from engine_worker.sampling_defaults import OF_MODEL
from mesh.errors import ConfigurationError
from mesh.identity.authority import make_identities
from mesh.identity.files import IDENTITY_VARIABLE
from mesh.identity.tls import transport_of
from mesh.membership import Directory
from mesh.parent_death import end_with_parent_if_asked
from mesh.run_file import RunFile, remove_run_file, run_dir, write_run_file
from mesh.runtime import Runtime, system_runtime
from mesh.store import open_store
from mesh.store.interface import StateStore
from services.cli.carriers.carried import CPU_IMAGE, GPU_IMAGE, launcher_on, ray_cluster_on
from services.cli.carriers.carrier_options import carrier_options
from services.cli.connection import AS_OPERATOR, DEFAULT_MESH, mesh_name
from services.cli.length_options import learnt_dir_of, length_options, predictor_artefacts
from services.cli.supervisor.deployer import Patience
from services.cli.supervisor.first_profile import profile_models
from services.cli.supervisor.free_port import check_port_is_free
from services.cli.supervisor.gpu_count import count_gpus
from services.cli.supervisor.local_mesh import (
    DRAIN_S,
    LOOPBACK,
    LocalMesh,
    PhaseCounts,
    parse_attached,
    parse_model,
)
from services.cli.supervisor.planned_run import deployment_of, run_as_planned, start_processes, write_first_settings
from services.cli.supervisor.readiness import tell_of_start, wait_until_serving
from services.cli.supervisor.state_server import StateServer
from services.cli.supervisor.supervisor import Supervisor

DEFAULT_DEMO_MODEL = "demo-large"
DEFAULT_WORKERS = 3


@dataclass(frozen=True, slots=True)
class UpOptions:
    """Options of `penstock up`."""

    engine: str
    models: tuple[str, ...]
    attach: tuple[str, ...]
    workers: int | None
    prefill: int
    decode: int
    profile: bool
    engine_arg: tuple[str, ...]
    generation_config: str
    override_generation_config: str
    otlp_traces_endpoint: str
    otlp_traces_share: float
    tool_call_parser: tuple[str, ...]
    reasoning_parser: tuple[str, ...]
    host: str
    port: int
    gateway_port: int
    frontends: int
    share_port: bool
    schedulers: int
    monitors: int
    policy: str
    rescheduler: str
    stages: bool
    predictor_artefact: tuple[Path, ...]
    learn_lengths: bool
    learnt_dir: Path | None
    insecure: bool
    store: str | None
    store_file: Path | None
    name: str
    ready_timeout_s: float
    drain_s: float
    host_kv: str
    disk_kv: str
    gpu_kind: str
    carrier: str
    image: str


def _known_policy(_context: click.Context, _parameter: click.Parameter, name: str) -> str:
    """Raises `click.BadParameter`, which ends the command with status 2 before anything is started."""
    try:
        create_policy(name)
    except ConfigurationError as error:
        raise click.BadParameter(str(error)) from None
    return name


@click.command()
@click.option(
    "--engine",
    metavar="NAME",
    default="vllm",
    show_default=True,
    help="Engine of every instance: vllm, simulated, or one of an installed package (`penstock plugins`).",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    help="A demo model, a directory, or a model of the Hugging Face Hub such as Qwen/Qwen3-0.6B (@REVISION behind it); "
    "NAME= before it for another name, :COUNT behind it for that many instances; repeatable. "
    f"Default: {DEFAULT_DEMO_MODEL}.",
)
@click.option(
    "--attach",
    multiple=True,
    metavar="[MODEL=]URL",
    help="A server that runs already, such as a `vllm serve`; [,NAME=VALUE...] behind it says what it does not "
    "(docs/attach.md); repeatable. Own instances only with --model then.",
)
@click.option(
    "--workers",
    type=int,
    help="Instances of a model that names no count. "
    f"Default: {DEFAULT_WORKERS}, or none beside those of --prefill and --decode.",
)
@click.option(
    "--prefill", default=0, show_default=True, help="Instances of each model for prefill only; with --decode."
)
@click.option("--decode", default=0, show_default=True, help="Instances of each model for decode only; with --prefill.")
@click.option(
    "--profile",
    is_flag=True,
    help="Measure an instance of each model first, for half a minute or so, for policies that predict.",
)
@click.option(
    "--engine-arg",
    multiple=True,
    help="An argument of every instance's engine, NAME=VALUE; for vllm any that `vllm serve` has; repeatable.",
)
@click.option(
    "--generation-config",
    metavar="SOURCE",
    default="auto",
    show_default=True,
    help="Where sampling parameters come from that a request leaves out: auto (the model's generation_config.json), "
    "vllm (vLLM's neutral ones), or a directory that holds such a file.",
)
@click.option(
    "--override-generation-config", metavar="JSON", default="", help='An object put over them: {"temperature": 0.5}.'
)
@click.option(
    "--otlp-traces-endpoint",
    metavar="URL",
    default="",
    help="An OpenTelemetry collector that gets a span of every hop of a request: http://127.0.0.1:4318/v1/traces.",
)
@click.option(
    "--otlp-traces-share",
    type=click.FloatRange(0, 1),
    default=1.0,
    show_default=True,
    help="Of the requests whose client sends no traceparent, how many are recorded.",
)
@click.option(
    "--tool-call-parser",
    multiple=True,
    metavar="[MODEL=]NAME",
    help="The form in which a model calls tools, of every model or of one, in vLLM's names: such as hermes.",
)
@click.option(
    "--reasoning-parser",
    multiple=True,
    metavar="[MODEL=]NAME",
    help="How a model marks its reasoning, of every model or of one, in vLLM's names: such as qwen3.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the HTTP endpoint.")
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=8000,
    show_default=True,
    help="Port of the HTTP endpoint; of the first one of several, which have consecutive ports.",
)
@click.option(
    "--gateway-port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default=True,
    help="Port on which an Envoy has endpoints picked among the servers of --attach (docs/gateway.md); 0: none.",
)
@click.option("--frontends", type=int, default=1, show_default=True, help="Frontends, each with an HTTP endpoint.")
@click.option(
    "--share-port",
    is_flag=True,
    help="All frontends serve --port together, whoever of them lives; their own ports are those behind it.",
)
@click.option("--schedulers", type=int, default=1, show_default=True, help="Schedulers, which share the placements.")
@click.option("--monitors", type=int, default=1, show_default=True, help="Monitors; each hears of all instances.")
@click.option(
    "--policy",
    metavar="NAME",
    callback=_known_policy,
    default=DEFAULT_POLICY,
    show_default=True,
    help="Placement policy to begin with, as `penstock policy` lists them.",
)
@click.option(
    "--rescheduler",
    type=click.Choice(["off", "current", "predicted", "trajectories"]),
    default="off",
    show_default=True,
    help="What running requests are moved by to begin with.",
)
@click.option(
    "--stages",
    is_flag=True,
    help="Divide each model's instances into stages by the length of requests; --policy is `stages` then.",
)
@length_options
@carrier_options
@click.option(
    "--host-kv",
    metavar="SIZE",
    default="",
    help="Memory of this machine for KV blocks that leave an engine, such as 8GiB, for each model. Default: none.",
)
@click.option(
    "--disk-kv", metavar="SIZE[:DIR]", default="", help="Disk for what has no room there: 200GiB:/var/tmp/kv."
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Ask no process who it is: every user of this machine may then order the mesh about (docs/security.md).",
)
@click.option("--store", help="State store to use, such as etcd://127.0.0.1:2379. Default: one inside this process.")
@click.option(
    "--store-file", type=click.Path(path_type=Path), help="Keep that inner store's lasting keys in this file."
)
@click.option(
    "--mesh",
    "name",
    callback=mesh_name,
    default=DEFAULT_MESH,
    show_default=True,
    help="Name of the mesh: tells several on one machine apart.",
)
@click.option(
    "--ready-timeout-s",
    type=click.FloatRange(min=0, min_open=True, max=1e6),
    default=300.0,
    show_default=True,
    help="Give up if it does not serve by then, or on an instance that a plan adds.",
)
@click.option(
    "--drain-s",
    envvar="PENSTOCK_SERVE_WORKER_DRAIN_S",
    type=click.FloatRange(min=0, max=1e6),
    default=DRAIN_S,
    show_default=True,
    help="What an instance that is drained gives its requests that cannot move to another, and a frontend its streams.",
)
def command(**options: Any) -> None:
    """Start a whole mesh on this machine and keep it running until Ctrl-C.

    Other settings of the processes come from the environment: see `penstock serve ROLE --help`.
    """
    raise SystemExit(asyncio.run(_up(UpOptions(**options))))


async def _up(options: UpOptions) -> int:
    end_with_parent_if_asked()
    engine = ENGINES.get(options.engine)
    stop_asked, cut_asked = _signals()
    for port in range(options.port, options.port + options.share_port + max(1, options.frontends)):
        check_port_is_free(options.host, port)
    if options.gateway_port:
        check_port_is_free(options.host, options.gateway_port)
    started_s = time.monotonic()
    http_url = f"http://{options.host}:{options.port}"
    log_dir = run_dir() / options.name / "logs"
    identity = _identity(options)
    runtime = system_runtime(AS_OPERATOR)
    AS_OPERATOR.use(identity)
    say = partial(click.echo, err=True)
    async with AsyncExitStack() as held:
        if identity and not options.store:
            held.callback(shutil.rmtree, identity, ignore_errors=True)
        cluster = await held.enter_async_context(ray_cluster_on(options.carrier, options.name, log_dir))
        host = LOOPBACK if cluster is None else cluster.host
        gpu_count = (count_gpus() if cluster is None else cluster.gpus) if engine.uses_gpus else 0
        store_url, store = await held.enter_async_context(_store(options, runtime, identity, host))
        write_run_file(options.name, RunFile(os.getpid(), store_url, http_url, str(log_dir), identity))
        held.callback(remove_run_file, options.name, os.getpid())
        mesh = _local_mesh(options, store_url, identity, host)
        image = options.image or (GPU_IMAGE if gpu_count else CPU_IMAGE)
        carried = launcher_on(options.carrier, image, options.name, mesh, log_dir, say, cluster)
        supervisor = Supervisor(await held.enter_async_context(carried), say)
        try:
            await write_first_settings(store, options.policy, options.rescheduler, options.stages)
            gpus = GpuPool(gpu_count, cores=cores_of(mesh.engine_args))
            await start_processes(mesh, supervisor, gpus)
            click.echo(f"starting {len(supervisor.pids())} processes; their logs: {log_dir}", err=True)
            serving = await _until_serving(store, mesh, supervisor, options.ready_timeout_s, stop_asked)
            if serving and options.profile:
                await profile_models(store, [model.name for model in mesh.models], log_dir, say)
            if serving:
                _say_how_to_use(mesh, options.name, http_url, time.monotonic() - started_s)
                patience = Patience(options.ready_timeout_s, mesh.drain_s)
                manager = deployment_of(options.name, mesh, gpus, patience, options.gpu_kind)
                await run_as_planned(manager, store, mesh, supervisor, patience, runtime.clock, stop_asked, say)
            return 0 if serving or stop_asked.is_set() else 1
        finally:
            click.echo("stopping; Ctrl-C again cuts running requests", err=True)
            await _stop(supervisor, cut_asked)
            if options.host_kv:
                remove_stores(directory_of_mesh(options.name))


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Events of the first and of the second Ctrl-C or SIGTERM."""
    stop_asked, cut_asked = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: (cut_asked if stop_asked.is_set() else stop_asked).set())
    return stop_asked, cut_asked


def _identity(options: UpOptions) -> str:
    """Folder with the identities of all roles; empty: none. Raises ConfigurationError.

    A mesh with a store of its own makes them anew at each start, in a folder of this user's alone. One that shares its
    store with others needs identities that those know, too.
    """
    if options.insecure:
        return ""
    if options.store:
        return os.environ.get(IDENTITY_VARIABLE, "")
    return str(make_identities(run_dir() / options.name / "identity", options.name.lower(), datetime.now(UTC)))


@asynccontextmanager
async def _store(
    options: UpOptions, runtime: Runtime, identity: str, host: str
) -> AsyncIterator[tuple[str, StateStore]]:
    """The store's URL and a connection to it; without --store, one is served from this process meanwhile."""
    served = replace(runtime, transport=transport_of(identity, "store"))
    server = None if options.store else await StateServer.start(served, options.store_file, address=f"{host}:0")
    store_url = options.store or (server.url if server else "")
    store = open_store(store_url, runtime)
    try:
        yield store_url, store
    finally:
        await store.close()
        if server is not None:
            await server.stop()


def _local_mesh(options: UpOptions, store_url: str, identity: str, host: str) -> LocalMesh:
    phases = PhaseCounts(options.prefill, options.decode)
    names = options.models or (() if options.attach else (DEFAULT_DEMO_MODEL,))
    locate = partial(locate_checkpoint, with_weights=ENGINES.get(options.engine).needs_weights)
    models = tuple(parse_model(name, _any_workers(options), phases, locate) for name in names)
    if len({model.name for model in models}) < len(models):
        raise ConfigurationError(
            f"--model {' --model '.join(names)}: a name stands twice; give it once, with :COUNT behind it for several "
            "instances"
        )
    return LocalMesh(
        models=models,
        engine=options.engine,
        engine_args=options.engine_arg,
        tool_call_parsers=options.tool_call_parser,
        reasoning_parsers=options.reasoning_parser,
        store_url=store_url,
        http_host=options.host,
        http_port=options.port,
        predictor_artefacts=predictor_artefacts(
            options.predictor_artefact, models, options.engine, learns_all=options.learn_lengths
        ),
        learnt_dir=learnt_dir_of(options.learnt_dir, options.store_file),
        drain_s=options.drain_s,
        frontends=options.frontends,
        shares_port=options.share_port,
        schedulers=options.schedulers,
        monitors=options.monitors,
        worker_options=_worker_options(options),
        traced_options=_traced_options(options),
        attached=tuple(parse_attached(each) for each in options.attach),
        gateway_port=options.gateway_port,
        identity=identity,
        host=host,
        insecure=options.insecure,
    )


def _traced_options(options: UpOptions) -> tuple[str, ...]:
    """Where those that record spans send them, if anywhere."""
    endpoint, share = options.otlp_traces_endpoint, f"{options.otlp_traces_share:g}"
    return ("--otlp-traces-endpoint", endpoint, "--otlp-traces-share", share) if endpoint else ()


def _worker_options(options: UpOptions) -> tuple[str, ...]:
    """Those of every worker that were given. Raises ConfigurationError."""
    host_tier_settings(options.host_kv, "", options.disk_kv)
    told = {
        "--host-kv": options.host_kv,
        "--host-kv-dir": str(directory_of_mesh(options.name)) if options.host_kv else "",
        "--disk-kv": options.disk_kv,
        "--generation-config": options.generation_config if options.generation_config != OF_MODEL else "",
        "--override-generation-config": options.override_generation_config,
    }
    return tuple(part for option, value in told.items() if value for part in (option, value))


def _any_workers(options: UpOptions) -> int:
    """Instances for both phases of a model that names no count: none beside those of one phase, unless asked for."""
    if options.workers is not None:
        return options.workers
    return 0 if options.prefill or options.decode else DEFAULT_WORKERS


async def _until_serving(
    store: StateStore, mesh: LocalMesh, supervisor: Supervisor, timeout_s: float, stop_asked: asyncio.Event
) -> bool:
    """True once every instance can be reached through the endpoint; False if asked to stop before, too late, or when
    a process is given up."""
    directory = Directory(store)
    await directory.start()
    workers = sum(model.instances for model in mesh.models) + len(mesh.attached)
    ready = asyncio.create_task(
        wait_until_serving(
            directory, workers, mesh.frontends, mesh.schedulers, len(mesh.attached) if mesh.gateway_port else None
        )
    )
    ends = [asyncio.create_task(stop_asked.wait()), asyncio.create_task(supervisor.wait_given_up())]
    telling = asyncio.create_task(tell_of_start(directory, workers, timeout_s, partial(click.echo, err=True)))
    await asyncio.wait((ready, *ends), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    is_ready, given_up = ready.done(), ends[1].done()
    for task in (ready, telling, *ends):
        task.cancel()
    await directory.stop()
    if is_ready:
        ready.result()
        return True
    if given_up:
        click.echo("the mesh cannot serve without a process that was given up; see the reason above", err=True)
    elif not stop_asked.is_set():
        click.echo(f"the mesh was not serving within {timeout_s:g} s; see the logs", err=True)
    return False


def _say_how_to_use(mesh: LocalMesh, name: str, http_url: str, seconds: float) -> None:
    of_mesh = "" if name == DEFAULT_MESH else f" --mesh {name}"
    # An attached server's model has its name from the server, which /v1/models of this endpoint tells.
    model = mesh.models[0].name if mesh.models else mesh.attached[0].model or "MODEL"
    if "runner=pooling" in mesh.engine_args:
        path, body = "embeddings", f'{{"model": "{model}", "input": "Count from 7 up to 12."}}'
    else:
        path = "chat/completions"
        body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Count from 7 up to 12."}}]}}'
    own = mesh.http_ports if mesh.shares_port else mesh.http_ports[1:]
    others = "".join(f", http://{mesh.http_host}:{port}" for port in own)
    click.echo(f"serving at {http_url}{others} after {seconds:.1f} s")
    click.echo(f"try:    curl {http_url}/v1/{path} -H 'content-type: application/json' -d '{body}'")
    if mesh.gateway_port:
        click.echo(f"an Envoy has endpoints picked at {mesh.http_host}:{mesh.gateway_port} (deploy/envoy/envoy.yaml)")
    click.echo(f"see:    {http_url}/console, or penstock top{of_mesh}")
    click.echo(f"status: penstock status{of_mesh}")


async def _stop(supervisor: Supervisor, cut_asked: asyncio.Event) -> None:
    stop = asyncio.create_task(supervisor.stop())
    cut = asyncio.create_task(cut_asked.wait())
    await asyncio.wait((stop, cut), return_when=asyncio.FIRST_COMPLETED)
    cut.cancel()
    if not stop.done():
        supervisor.kill()
    await stop
