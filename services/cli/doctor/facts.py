"""What `penstock doctor` knows of a machine. Plain values: nothing here is judged, and nothing looks anything up."""

import re
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Gpu:
    """As nvidia-smi lists it."""

    index: int
    name: str
    memory_mib: int


@dataclass(frozen=True, slots=True)
class Transport:
    """A transport of UCX and a device that it works on here."""

    name: str
    device: str


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """A machine as it was found; None and empty where a thing is not there, `..._error` where asking failed."""

    python: str
    cpus: int
    memory_bytes: int
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    driver_error: str = ""
    """Why nvidia-smi, which is there, told nothing."""
    unreachable_gpus: tuple[tuple[int, int, str], ...] = ()
    """Pairs of GPUs that cannot read each other's memory, and nvidia-smi's word for why."""
    vllm: str | None = None
    """Version of the package, of its CPU build too."""
    vllm_device: str = ""
    """cpu or cuda: what it was built for."""
    ucx: str | None = None
    ucx_error: str = ""
    transports: tuple[Transport, ...] = ()
    rdma_devices: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    """Variables UCX_... that are set."""
    shm_bytes: int = 0
    shm_free_bytes: int = 0
    open_files: int = 0
    """Soft limit; -1 is none."""
    open_files_hard: int = 0
    locked_bytes: int = 0
    """Soft limit of locked memory; -1 is none."""
    store_url: str = ""
    store_ms: float | None = None
    """How long it took to answer."""
    store_error: str = ""
    clock_offsets_s: tuple[tuple[str, float], ...] = ()
    """Of other members of the mesh: how far their clocks are ahead of this one's, to a second."""
    is_monotonic: bool = True
    """The monotonic clock never went back while it was looked at."""
    taken_ports: tuple[tuple[int, str], ...] = ()
    """Ports that were asked for and cannot be had, and why."""
    free_ports: tuple[int, ...] = ()
    missing_packages: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By extra of the penstock package: what of it is not installed."""


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """`nvidia-smi --query-gpu=index,name,memory.total --format=csv,noheader,nounits`."""
    found = []
    for line in text.splitlines():
        index, name, memory = (part.strip() for part in line.split(",")) if line.count(",") == 2 else ("", "", "")
        if index.isdigit():
            found.append(Gpu(int(index), name, int(memory) if memory.isdigit() else 0))
    return tuple(found)


def parse_peer_access(text: str) -> tuple[tuple[int, int, str], ...]:
    """Pairs that are not OK in the table of `nvidia-smi topo -p2p r`."""
    pairs = []
    for line in text.splitlines():
        row, *words = line.split()[:1] + line.split()[1:] or [""]
        if not re.fullmatch(r"GPU\d+", row) or any(re.fullmatch(r"GPU\d+", word) for word in words):
            continue
        first = int(row[3:])
        pairs += [
            (first, second, word) for second, word in enumerate(words) if second > first and word not in ("OK", "X")
        ]
    return tuple(pairs)


def parse_transports(text: str) -> tuple[Transport, ...]:
    """`ucx_info -d`."""
    found: dict[Transport, None] = {}
    name = ""
    for line in text.splitlines():
        if match := re.match(r"#\s+(Transport|Device): (\S+)", line):
            kind, value = match.groups()
            if kind == "Transport":
                name = value
            elif name:
                found[Transport(name, value)] = None
    return tuple(found)
