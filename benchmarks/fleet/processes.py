"""The processes of the fleet: what they use, and how they are started and ended."""

import asyncio
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop
from prometheus_client import CollectorRegistry

from benchmarks.process_cpu import process_cpu_s
from mesh.rpc.metrics import RpcMetrics
from mesh.rpc.server import RpcServer
from mesh.runtime import system_runtime
from mesh.store.host import StoreHost
from mesh.store.service import StateService
from penstock.v1 import state_pb2_grpc


@dataclass(frozen=True, slots=True)
class Process:
    """Of a role, and what it has used."""

    role: str
    pid: int

    def cpu_s(self) -> float:
        """Of all its threads so far."""
        return process_cpu_s(self.pid)

    def memory_bytes(self) -> int:
        """Resident in main memory now, shared pages included."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


def serve_store(pipe: Connection) -> None:
    """Sends its address, then, whenever it is asked, how many calls of each method came."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve_store(pipe))


async def _serve_store(pipe: Connection) -> None:
    registry, runtime = CollectorRegistry(), system_runtime()
    host = StoreHost(runtime.clock, runtime.entropy)
    server = RpcServer(runtime.transport, metrics=RpcMetrics(registry))
    server.add(state_pb2_grpc.add_StateServicer_to_server, StateService(host), "penstock.v1.State")
    await server.start()
    await server.set_serving(True)
    pipe.send(f"penstock://{server.address}")
    while await asyncio.get_running_loop().run_in_executor(None, pipe.recv):
        families = [each for each in registry.collect() if each.name == "penstock_rpc_calls"]
        totals = [each for family in families for each in family.samples if each.name.endswith("_total")]
        pipe.send({each.labels["method"].rpartition("/")[2]: each.value for each in totals})
    host.close()
    await server.stop(0)


@contextmanager
def a_child(target: Any, *arguments: Any) -> Iterator[tuple[Connection, int]]:
    """A process that has a pipe to this one, and its id; it is told to end."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(there, *arguments), daemon=True)
    process.start()
    there.close()
    assert process.pid is not None, "it was started"
    try:
        yield here, process.pid
    finally:
        with ExitStack() as stack:
            stack.callback(process.kill)
            here.send(None)
            process.join(timeout=10)


@contextmanager
def a_role(role: str, member_id: str, store_url: str, *options: str) -> Iterator[int]:
    """`penstock serve ROLE`, by its process id."""
    command = (sys.executable, "-m", "services.cli.main", "serve", role, "--store", store_url, "--member-id", member_id)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen((*command, "--log-level", "error", *options), stderr=log)
        try:
            yield process.pid
        finally:
            process.terminate()
            process.wait(timeout=30)
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace")[-2000:])
