"""Which processes make up a mesh on one machine (pure)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from controlplane.deployment.gpus import CPU_PLACES
from controlplane.deployment.replicas import Shape, id_part, shaped
from engine_worker.checkpoint_source import is_hugging_face_id, locate_checkpoint
from mesh.errors import ConfigurationError
from mesh.text_files import has_tokenizer
from services.cli.supervisor.launcher import ProcessSpec

DEMO_MODELS = Path(__file__).resolve().parents[3] / "demo" / "models"
DEMO_PREDICTORS = DEMO_MODELS.parent / "predictors"
DEMO_ENGINE_ARGS = (
    "structured_outputs_config.backend=xgrammar",
    "structured_outputs_config.disable_any_whitespace=true",
)
MAX_WORKERS = CPU_PLACES
MAX_OF_A_ROLE = 8
LAST_PORT = 65535
LOOPBACK = "127.0.0.1"
DRAIN_S = 600.0
"""What a worker that is asked to end gives requests that cannot move to another: as long as frontends let a request
run, so that none is cut. The supervisor waits as long for it."""


@dataclass(frozen=True, slots=True)
class PhaseCounts:
    """Instances of each model that are for one phase only."""

    prefill: int = 0
    decode: int = 0

    def __post_init__(self) -> None:
        if self.prefill < 0 or self.decode < 0:
            raise ConfigurationError(f"--prefill {self.prefill} --decode {self.decode}: counts of instances, 0 or more")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model to serve and the number of instances that serve it."""

    name: str
    path: Path
    workers: int
    """Instances that do both prefill and decode."""
    phases: PhaseCounts = field(default_factory=PhaseCounts)

    @property
    def instances(self) -> int:
        """How many instances of the model there are in all."""
        return self.workers + self.phases.prefill + self.phases.decode


@dataclass(frozen=True, slots=True)
class AttachedServer:
    """A server that runs already, and what it does not say of itself."""

    url: str
    model: str = ""
    """What clients call its model; empty: what the server calls it."""
    model_path: str = ""
    """Its tokenizer; empty: where the server has its model from."""
    engine_args: tuple[str, ...] = ()
    """NAME=VALUE of `AttachedSettings`, the URL among them."""


@dataclass(frozen=True, slots=True)
class LocalMesh:
    """What `penstock up` was asked for."""

    models: tuple[ModelSpec, ...]
    engine: str
    engine_args: tuple[str, ...]
    """NAME=VALUE, for every worker."""
    store_url: str
    http_host: str
    http_port: int
    predictor_artefacts: tuple[Path, ...] = ()
    """Folders that the length predictor serves and watches."""
    learnt_dir: Path | None = None
    """Where the length predictor keeps what it has learnt; None: it forgets."""
    drain_s: float = DRAIN_S
    """What every worker and frontend is told."""
    frontends: int = 1
    """On consecutive ports from `http_port`."""
    shares_port: bool = False
    """All frontends serve `http_port` together; their own ports are those behind it."""
    schedulers: int = 1
    monitors: int = 1
    tool_call_parsers: tuple[str, ...] = ()
    """[MODEL=]NAME."""
    reasoning_parsers: tuple[str, ...] = ()
    """[MODEL=]NAME."""
    worker_options: tuple[str, ...] = ()
    """Options of every worker, as its command line takes them."""
    traced_options: tuple[str, ...] = ()
    """Those of every process that records spans: frontends and workers."""
    attached: tuple[AttachedServer, ...] = ()
    """Servers that are none of this mesh's own."""
    identity: str = ""
    """Folder with a folder of each role's identity; empty: nobody has one."""
    host: str = LOOPBACK
    """Address of this machine on which its processes reach each other, and instances that run elsewhere reach them."""
    insecure: bool = False
    """Its processes listen there even if they have no identity."""
    gateway_port: int = 0
    """Where an Envoy has the endpoints of its requests picked; 0: nowhere."""

    def __post_init__(self) -> None:
        for option in ("frontends", "schedulers", "monitors"):
            count = getattr(self, option)
            if not 1 <= count <= MAX_OF_A_ROLE:
                raise ConfigurationError(f"--{option} {count}: 1 to {MAX_OF_A_ROLE} are possible here")
        for parser in (*self.tool_call_parsers, *self.reasoning_parsers):
            model = parser.rpartition("=")[0]
            if model and model not in {each.name for each in self.models} | {each.model for each in self.attached}:
                raise ConfigurationError(f"a parser is given for {model!r}, which is no --model here")
        if max(self.http_ports) > LAST_PORT:
            raise ConfigurationError(
                f"--port {self.http_port} --frontends {self.frontends}: ports end at {LAST_PORT}; choose a lower --port"
            )

    @property
    def http_ports(self) -> tuple[int, ...]:
        """Port of each frontend's own, the first one's first."""
        return tuple(self.http_port + self.shares_port + index for index in range(self.frontends))


def parse_model(
    text: str,
    default_workers: int,
    phases: PhaseCounts | None = None,
    locate: Callable[[str], Path] = locate_checkpoint,
) -> ModelSpec:
    """NAME, NAME=SOURCE, and either with :COUNT behind it. A source is a directory or a model of the Hugging Face Hub;
    a bare NAME is a demo model or a source of its own. `locate` finds the directory of a source.

    Raises ConfigurationError if there is no such model.
    """
    body, workers = text, default_workers
    head, colon, tail = text.rpartition(":")
    if colon and tail.isdigit():
        body, workers = head, int(tail)
    name, equals, source = body.partition("=")
    if equals:
        path = locate(source)
    elif (DEMO_MODELS / Path(name).name).is_dir() and "/" not in name:
        path = DEMO_MODELS / name
    elif is_hugging_face_id(name):
        path = locate(name)
    else:
        path, name = Path(name), Path(name).name
    if not has_tokenizer(path):
        known = ", ".join(sorted(entry.name for entry in DEMO_MODELS.iterdir() if entry.is_dir()))
        raise ConfigurationError(
            f"no model at {path}, which would hold a tokenizer: --model takes a demo model ({known}), a "
            "directory with a Hugging Face checkpoint, a model of the Hub (Qwen/Qwen3-0.6B), or NAME= before these"
        )
    model = ModelSpec(name, path.resolve(), workers, phases or PhaseCounts())
    if workers < 0 or not 1 <= model.instances <= MAX_WORKERS:
        raise ConfigurationError(
            f"--model {text}: {model.instances} instances asked for, 1 to {MAX_WORKERS} are possible here"
        )
    return model


def parse_attached(url: str, model: str = "", model_path: str = "", more: tuple[str, ...] = ()) -> AttachedServer:
    """[MODEL=]URL[,NAME=VALUE...]. `more`: further NAME=VALUE. Raises ConfigurationError where there is no URL."""
    first, *arguments = url.split(",")
    head, equals, tail = first.partition("=")
    name, address = (head, tail) if equals and "://" not in head else ("", first)
    if not address.startswith(("http://", "https://")):
        raise ConfigurationError(f"{url!r} is no URL of a server; give one such as http://gpu-1:8000")
    paths = [argument.partition("=")[2] for argument in arguments if argument.startswith("tokenizer=")]
    others = tuple(argument for argument in arguments if not argument.startswith("tokenizer="))
    if wrong := [argument for argument in others if "=" not in argument]:
        raise ConfigurationError(f"{url!r}: {wrong[0]!r} is no NAME=VALUE")
    return AttachedServer(address, model or name, model_path or "".join(paths[:1]), (f"url={address}", *others, *more))


def attached_process(
    server: AttachedServer, name: str, store_url: str, drain_s: float, options: tuple[str, ...] = ()
) -> ProcessSpec:
    """The worker that is a server's client. `options`: further ones of `penstock serve worker`."""
    engine_args = tuple(part for argument in server.engine_args for part in ("--engine-arg", argument))
    model = ("--model", server.model, "--model-path", server.model_path, "--engine", "attached")
    common = ("--store", store_url, "--member-id", name, "--drain-s", f"{drain_s:g}")
    return ProcessSpec(name, "worker", (*common, *options, *model, *engine_args))


def demo_predictors(models: tuple[ModelSpec, ...]) -> tuple[Path, ...]:
    """The artefacts that come with those of the models that are demo models."""
    folders = (DEMO_PREDICTORS / model.path.name for model in models if model.path.parent == DEMO_MODELS)
    return tuple(folder for folder in dict.fromkeys(folders) if folder.is_dir())


def processes(mesh: LocalMesh) -> tuple[ProcessSpec, ...]:
    """All processes, in the order in which they are started."""
    artefacts = tuple(part for folder in mesh.predictor_artefacts for part in ("--artefact", str(folder)))
    learnt = ("--learnt-dir", str(mesh.learnt_dir)) if mesh.learnt_dir is not None else ()
    control_plane = (
        *(_process(mesh, "monitor", name) for name in _names("monitor", mesh.monitors)),
        *(_process(mesh, "scheduler", name) for name in _names("scheduler", mesh.schedulers)),
        _process(mesh, "predictor", "predictor", *artefacts, *learnt),
        *(_process(mesh, role, role) for role in ("cascade", "planner")),
    )
    shared = ("--shared-http-port", str(mesh.http_port)) if mesh.shares_port else ()
    console = ("--console-identity", f"{mesh.identity}/operator") if mesh.identity else ()
    frontends = (
        _drained_process(
            mesh, "frontend", name, "--http-host", mesh.http_host, "--http-port", str(port), *shared, *console
        )
        for name, port in zip(_names("frontend", mesh.frontends), mesh.http_ports, strict=True)
    )
    gateways = (
        [_drained_process(mesh, "gateway", "gateway", "--bind-host", mesh.http_host, "--port", str(mesh.gateway_port))]
        if mesh.gateway_port
        else ()
    )
    identity = ("--identity", f"{mesh.identity}/worker") if mesh.identity else ()
    common = (*_address_options(mesh), *identity, *mesh.traced_options, *mesh.worker_options)
    attached = (
        attached_process(
            server,
            f"attached-{index}",
            mesh.store_url,
            mesh.drain_s,
            (*common, *_parser_options(mesh, server.model)),
        )
        for index, server in enumerate(mesh.attached)
    )
    return (*own_workers(mesh), *attached, *frontends, *gateways, *control_plane)


def worker_process(mesh: LocalMesh, model: str, name: str, shape: Shape) -> ProcessSpec:
    """Another instance of a model, its engine in this shape.

    Raises `ConfigurationError` for a model that this mesh was not started with and that is no demo model.
    """
    known = next((spec for spec in mesh.models if spec.name == model), None) or parse_model(model, 1)
    options = tuple(part for option in shaped(_engine_args(mesh, known), shape) for part in ("--engine-arg", option))
    return _worker(mesh, name, "--engine", mesh.engine, *options, *_model_options(mesh, known))


def _names(role: str, count: int) -> tuple[str, ...]:
    """The only one of a role is called like it."""
    return (role,) if count == 1 else tuple(f"{role}-{index}" for index in range(count))


def own_workers(mesh: LocalMesh) -> tuple[ProcessSpec, ...]:
    """Those of `processes` that have an engine of their own; the others that are workers have an attached server."""
    specs: list[ProcessSpec] = []
    for model in mesh.models:
        engine_args = (part for option in _engine_args(mesh, model) for part in ("--engine-arg", option))
        options = ("--engine", mesh.engine, *engine_args, *_model_options(mesh, model))
        for index in range(model.workers):
            specs.append(_worker(mesh, f"{id_part(model.name)}-{index}", *options))
        for phase, count in (("prefill", model.phases.prefill), ("decode", model.phases.decode)):
            for index in range(count):
                specs.append(_worker(mesh, f"{id_part(model.name)}-{phase}-{index}", *options, "--phase", phase))
    return tuple(specs)


def _model_options(mesh: LocalMesh, model: ModelSpec) -> tuple[str, ...]:
    """What is the model's and not the engine's."""
    return ("--model", model.name, "--model-path", str(model.path), *_parser_options(mesh, model.name))


def _parser_options(mesh: LocalMesh, model: str) -> tuple[str, ...]:
    options: list[str] = []
    for option, given in (("tool-call-parser", mesh.tool_call_parsers), ("reasoning-parser", mesh.reasoning_parsers)):
        for_model = [each.rpartition("=")[2] for each in given if each.rpartition("=")[0] in ("", model)]
        options += [f"--{option}", for_model[-1]] if for_model else []
    return tuple(options)


def _engine_args(mesh: LocalMesh, model: ModelSpec) -> tuple[str, ...]:
    """Demo models would write blanks for ever wherever a grammar lets them; what was asked for goes first."""
    asked = any(argument.startswith("structured_outputs") for argument in mesh.engine_args)
    is_weak = mesh.engine == "vllm" and model.path.parent == DEMO_MODELS
    return mesh.engine_args if asked or not is_weak else (*DEMO_ENGINE_ARGS, *mesh.engine_args)


def _worker(mesh: LocalMesh, name: str, *options: str) -> ProcessSpec:
    return _drained_process(mesh, "worker", name, *mesh.worker_options, *options)


def _drained_process(mesh: LocalMesh, role: str, name: str, *options: str) -> ProcessSpec:
    """One that requests run on: it is given as long as they may take."""
    return _process(mesh, role, name, "--drain-s", f"{mesh.drain_s:g}", *options)


def _process(mesh: LocalMesh, role: str, name: str, *options: str) -> ProcessSpec:
    traced = mesh.traced_options if role in ("frontend", "worker") else ()
    identity = ("--identity", f"{mesh.identity}/{role}") if mesh.identity else ()
    common = (*_address_options(mesh), *identity, *traced)
    return ProcessSpec(name, role, ("--store", mesh.store_url, "--member-id", name, *common, *options))


def _address_options(mesh: LocalMesh) -> tuple[str, ...]:
    elsewhere = ("--bind-host", mesh.host) if mesh.host != LOOPBACK else ()
    return (*elsewhere, *(("--insecure",) if mesh.insecure and elsewhere else ()))
