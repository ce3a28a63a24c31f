"""The container that an instance runs in (pure but for a look at its model's files)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from services.cli.supervisor.launcher import ProcessSpec

OWNER_LABEL: Final = "io.penstock.owner"
"""Whose a container is: the folder of the run file of a mesh, and the mesh's name."""
INSTANCE_LABEL: Final = "io.penstock.instance"
MODEL_LABEL: Final = "io.penstock.model"
PASSED_ON: Final = ("PENSTOCK_", "VLLM_", "UCX_", "NCCL_", "OMP_")
"""Variables with names that begin so are the instance's, too: settings, and no secrets of others."""
GPUS_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
HOME: Final = "/home/penstock"
SHARED_MEMORY_BYTES: Final = 2 << 30
"""For what the ranks of one engine exchange."""
_PATH_OPTIONS: Final = ("--model-path", "--identity")


@dataclass(frozen=True, slots=True)
class ContainerSettings:
    """What all containers of one mesh have in common."""

    mesh: str
    owner: str
    image: str
    user: str
    """UID:GID of the supervisor: who may read the identity and the model."""
    environment: Mapping[str, str]
    """Of the supervisor; what `PASSED_ON` says is passed on."""

    def name(self, instance: str) -> str:
        """The container's name."""
        return f"penstock-{self.mesh}-{instance}"


def container_config(spec: ProcessSpec, settings: ContainerSettings) -> dict[str, Any]:
    """As the engine's API takes it.

    It is on the machine's own network, like a process: the mesh's addresses on the loopback hold, and streams to its
    frontends go over unix sockets. Its root is read-only; it may write to its home and /tmp, in memory, and run what
    it has compiled there. What it reads stands at the same paths as outside.
    """
    environment = {
        **{name: value for name, value in settings.environment.items() if name.startswith(PASSED_ON)},
        **spec.environment,
        "HOME": HOME,
        "USER": "penstock",
    }
    # The engine gives it these GPUs alone, which count from 0 there.
    gpus = environment.pop(GPUS_VARIABLE, "")
    # It cannot be a child of the supervisor.
    environment.pop("PENSTOCK_PARENT_PID", None)
    labels = {
        OWNER_LABEL: settings.owner,
        INSTANCE_LABEL: spec.name,
        MODEL_LABEL: _options(spec.arguments).get("--model", ""),
    }
    host: dict[str, Any] = {
        "NetworkMode": "host",
        "Init": True,
        "ReadonlyRootfs": True,
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges:true"],
        "Tmpfs": {"/tmp": "exec,mode=1777", HOME: "exec,mode=1777"},
        "ShmSize": SHARED_MEMORY_BYTES,
        "LogConfig": {"Type": "json-file", "Config": {"max-size": "20m", "max-file": "5"}},
        "RestartPolicy": {"Name": "no"},
        "Mounts": [
            {"Type": "bind", "Source": str(path), "Target": str(path), "ReadOnly": True} for path in read_paths(spec)
        ],
    }
    if gpus:
        host["DeviceRequests"] = [{"Driver": "nvidia", "DeviceIDs": gpus.split(","), "Capabilities": [["gpu"]]}]
    return {
        "Image": settings.image,
        "Cmd": ["serve", spec.role, *spec.arguments],
        "Env": [f"{name}={value}" for name, value in sorted(environment.items())],
        "User": settings.user,
        "Labels": labels,
        "StopSignal": "SIGTERM",
        "HostConfig": host,
    }


def read_paths(spec: ProcessSpec) -> tuple[Path, ...]:
    """Folders that an instance reads: its identity, its checkpoint, and what links of the checkpoint lead to, as those
    of the Hugging Face Hub's cache do."""
    options = _options(spec.arguments)
    named = [Path(options[option]) for option in _PATH_OPTIONS if options.get(option, "").startswith("/")]
    linked = [target.parent for path in named for target in _link_targets(path)]
    return tuple(dict.fromkeys((*named, *linked)))


def _link_targets(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from sorted(each.resolve() for each in folder.iterdir() if each.is_symlink())


def _options(arguments: tuple[str, ...]) -> dict[str, str]:
    """The last value of each option."""
    return {option: value for option, value in pairwise(arguments) if option.startswith("--")}
