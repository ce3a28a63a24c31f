"""Throughput and CPU of moving KV (256 MiB by default) between two processes of this machine.

    python -m benchmarks.kv_throughput [--rounds 3] [--case NAME ...] [--json OUT]

Compares the KV transfer agent with gRPC streaming of the same bytes (1 MiB messages) and with the bare UCX binding
(ucxx's own asyncio interface, tag messages, its best progress mode and message size). Methods take turns, so that
what else the machine does falls on all of them; the figures are medians, and the ratios are of one run. CPU is that
of both processes together. What one thread copies within a process is measured in the same turns. `--gpu` measures
the agent with its blocks in the memory of the first GPU, which the two processes share.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from typing import Any

import click

from benchmarks.kv_throughput_process import BLOCK_BYTES, REGIONS
from engine_worker.kv.settings import GATHERED_BYTES

SHARED_MEMORY = "tcp,posix,sysv,self"
CUDA = f"{SHARED_MEMORY},cuda"
AT_LEAST_TIMES_GRPC = 4.0
WITHIN_TIMES_BARE = 1.5


@dataclass(frozen=True, slots=True)
class Case:
    """One way to move the bytes."""

    name: str
    method: str
    transports: str
    options: dict[str, Any] = field(default_factory=dict)
    blocks: str = "contiguous"
    parallel: int = 1
    both_directions: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """Medians over all pulls; a pull's bytes are those of both directions."""

    case: Case
    gb_per_s: float
    cpu_s_per_gb: float
    pulls: int
    slowest_gb_per_s: float
    fastest_gb_per_s: float


def moved_bytes(blocks: int) -> int:
    """KV bytes that one pull moves."""
    return REGIONS * blocks * BLOCK_BYTES


class Process:
    """One end of a transfer, in a process of its own that takes commands as lines of JSON."""

    def __init__(self, case: Case, blocks: int) -> None:
        command = [sys.executable, "-m", "benchmarks.kv_throughput_process"]
        command += [case.method, json.dumps(case.options), str(blocks)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"UCX_TLS": case.transports},
        )
        self.port = int(self._read())

    def begin(self, **command: Any) -> None:
        """Send a command; `end` waits for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def end(self) -> dict[str, float]:
        """Wait for the answer to the command that `begin` has sent."""
        answer: dict[str, float] = json.loads(self._read())
        return answer

    def cpu_s(self) -> float:
        """CPU seconds of the process so far."""
        self.begin(do="cpu")
        return self.end()["cpu_s"]

    def kill(self) -> None:
        """The bare binding has no clean end for a process that listens."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise click.ClickException("a process of the benchmark died; run it alone to see why")
        return line


def one_pull(case: Case, ends: tuple[Process, Process], blocks: int) -> tuple[float, float]:
    """GB/s, and CPU seconds per GB."""
    before_s = sum(end.cpu_s() for end in ends)
    pulling = ends if case.both_directions else ends[:1]
    for end, peer in zip(pulling, (ends[1], ends[0]), strict=False):
        end.begin(do="pull", port=peer.port, blocks=case.blocks, parallel=case.parallel)
    seconds = max(end.end()["seconds"] for end in pulling)
    gigabytes = moved_bytes(blocks) * len(pulling) / 1e9
    return gigabytes / seconds, (sum(end.cpu_s() for end in ends) - before_s) / gigabytes


def one_turn(case: Case, pulls: int, blocks: int) -> list[tuple[float, float]]:
    """Some pulls between two fresh processes, after two that bring the memory in."""
    ends: list[Process] = []
    try:
        ends += [Process(case, blocks)]
        ends += [Process(case, blocks)]
        return [one_pull(case, (ends[0], ends[1]), blocks) for _ in range(pulls + 2)][2:]
    finally:
        for end in ends:
            end.kill()


def measure(cases: list[Case], rounds: int, pulls: int, blocks: int) -> list[Result]:
    measured: dict[str, list[tuple[float, float]]] = {case.name: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            measured[case.name] += one_turn(case, pulls, blocks)
    return [
        Result(
            case=case,
            gb_per_s=statistics.median(speed for speed, _ in measured[case.name]),
            cpu_s_per_gb=statistics.median(cpu for _, cpu in measured[case.name]),
            pulls=len(measured[case.name]),
            slowest_gb_per_s=min(speed for speed, _ in measured[case.name]),
            fastest_gb_per_s=max(speed for speed, _ in measured[case.name]),
        )
        for case in cases
    ]


def comparison() -> list[Case]:
    cases = [Case("memcpy, one thread", "memcpy", SHARED_MEMORY), Case("grpc, 1 MiB messages", "grpc", SHARED_MEMORY)]
    for transports, label in ((SHARED_MEMORY, "shm"), ("tcp", "tcp")):
        cases += [
            Case(
                f"bare {label}, {mode}, {size} MiB messages",
                "bare",
                transports,
                {"progress_mode": mode, "message_bytes": size * 2**20},
            )
            for mode, size in product(("polling", "blocking"), (1, 4, 16))
        ]
        cases += [
            Case(f"agent {label}, contiguous", "agent", transports),
            Case(f"agent {label}, scattered", "agent", transports, blocks="scattered"),
            Case(f"agent {label}, contiguous, 3 parallel", "agent", transports, parallel=3),
            Case(f"agent {label}, both directions", "agent", transports, both_directions=True),
        ]
    return cases


def sweep() -> list[Case]:
    """Around the defaults of `KvTransferSettings`."""
    cases = [
        Case(f"agent {label}, contiguous, {size} KiB, window {window}", "agent", transports, options)
        for (transports, label), size, window in product(
            ((SHARED_MEMORY, "shm"), ("tcp", "tcp")), (1024, 4096, 16384), (4, 8, 16)
        )
        for options in [{"message_bytes": size * 1024, "window_messages": window}]
    ]
    cases += [
        Case(f"agent shm, scattered, {size} KiB", "agent", SHARED_MEMORY, {"gathered_bytes": size * 1024}, "scattered")
        for size in (128, 256, 512, 1024, 4096)
    ]
    in_place = {"direct_bytes": BLOCK_BYTES}
    return [*cases, Case("agent shm, scattered, each in place", "agent", SHARED_MEMORY, in_place, "scattered")]


def on_gpu() -> list[Case]:
    """Between memories of the first GPU, which both processes use, and by way of the host's."""
    cases = []
    for transports, label in ((CUDA, "cuda"), (SHARED_MEMORY, "pinned host")):
        options: dict[str, Any] = {"device": "cuda", "gathered_bytes": GATHERED_BYTES["cuda"]}
        cases += [
            Case(f"agent {label}, contiguous", "agent", transports, options),
            Case(f"agent {label}, scattered", "agent", transports, options, "scattered"),
            Case(f"agent {label}, scattered, 3 parallel", "agent", transports, options, "scattered", 3),
        ]
        cases += [
            Case(
                f"agent {label}, scattered, {size} MiB",
                "agent",
                transports,
                options | {"gathered_bytes": size * 2**20, "message_bytes": max(size, 4) * 2**20},
                "scattered",
            )
            for size in (1, 16)
        ]
    return cases


def chosen(cases: list[Case], patterns: Sequence[str]) -> list[Case]:
    """Those whose name matches one of the patterns; all without any. Raises `UsageError` if none does."""
    matching = [case for case in cases if not patterns or any(fnmatch(case.name, each) for each in patterns)]
    if not matching:
        raise click.UsageError(
            f"no case is called {' or '.join(patterns)}; there are: {'; '.join(c.name for c in cases)}"
        )
    return matching


def headline(results: list[Result]) -> dict[str, Any] | None:
    """The two ratios of the agent's contiguous pull over shared memory; None if one of the three was not measured."""
    speeds = {result.case.name: result.gb_per_s for result in results}
    if not {"agent shm, contiguous", "grpc, 1 MiB messages"} <= speeds.keys() or not any(map(_is_bare, speeds)):
        return None
    agent = speeds["agent shm, contiguous"]
    grpc_speed = speeds["grpc, 1 MiB messages"]
    best = max(filter(_is_bare, speeds), key=speeds.__getitem__)
    return {
        "agent_gb_per_s": agent,
        "times_grpc": agent / grpc_speed,
        "at_least_times_grpc": AT_LEAST_TIMES_GRPC,
        "best_bare": best,
        "bare_over_agent": speeds[best] / agent,
        "within_times_bare": WITHIN_TIMES_BARE,
    }


def _is_bare(name: str) -> bool:
    return name.startswith("bare shm")


def print_table(results: list[Result]) -> None:
    print(f"{'':44}  {'GB/s':>6}  {'CPU s/GB':>8}   slowest..fastest of the pulls")
    for r in results:
        print(
            f"{r.case.name:44}  {r.gb_per_s:6.2f}  {r.cpu_s_per_gb:8.3f}   "
            f"{r.slowest_gb_per_s:.2f}..{r.fastest_gb_per_s:.2f} of {r.pulls}"
        )


@click.command(help=__doc__.split("\n")[0] if __doc__ else None)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Where the result goes as JSON.")
@click.option("--rounds", default=3, show_default=True, help="Turns of each method.")
@click.option("--pulls", default=5, show_default=True, help="Measured in each turn.")
@click.option("--blocks", default=256, show_default=True, help="Of 1 MiB, moved by each pull.")
@click.option("--case", "patterns", multiple=True, help="Only cases of this name; may have * in it. Repeat for more.")
@click.option("--sweep", "is_sweep", is_flag=True, help="The agent's message sizes and windows instead.")
@click.option("--gpu", "is_on_gpu", is_flag=True, help="The agent with KV in a GPU's memory instead.")
def main(
    json_path: Path | None,
    rounds: int,
    pulls: int,
    blocks: int,
    patterns: tuple[str, ...],
    is_sweep: bool,
    is_on_gpu: bool,
) -> None:
    cases = on_gpu() if is_on_gpu else sweep() if is_sweep else comparison()
    results = measure(chosen(cases, patterns), rounds, pulls, blocks)
    print_table(results)
    result: dict[str, Any] = {
        "benchmark": "kv_throughput",
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "bytes": moved_bytes(blocks),
        "block_bytes": REGIONS * BLOCK_BYTES,
        "rounds": rounds,
        "pulls_per_round": pulls,
        "results": [asdict(each) for each in results],
    }
    if (ratios := headline(results)) is not None:
        result["headline"] = ratios
        print(json.dumps(ratios, indent=2))
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
