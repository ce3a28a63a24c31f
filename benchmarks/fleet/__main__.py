"""CPU, memory and staleness of monitors and schedulers with a fleet of busy instances, and the traffic of its store.

    python -m benchmarks.fleet [--instances 1000] [--seconds 20] [--slowdown 1] [--json OUT]

The store, the monitors and the schedulers run as `penstock serve` has them, each in a process of its own. The instances
(benchmarks/fleet/instances.py) have no engine, but the worker's own links to the monitors, over framed TCP or whatever
`--streams` says. Once the schedulers know all of them, CPU is counted for `--seconds`, by the clocks of the processes.
How old the newest report of each instance is, a scheduler's snapshots tell: instances stamp their reports with the
machine's clock. Then the workers' own announcements keep as many leases in the store, on one connection, and last the
scheduler places `--placements` requests a second.

Where the machine has too few cores for the instances themselves, `--slowdown 10` has reports and requests come ten
times less often. `cores` is what is used then, `at_full_speed` ten times that: an upper bound, since processes wake up
for less.
"""

import asyncio
import itertools
import json
import os
import statistics
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from benchmarks.fleet.instances import MODEL, PREFILLED_PER_MS, Share, block_hashes, keep_members, now_ms, play
from benchmarks.fleet.processes import Process, a_child, a_role, serve_store
from benchmarks.identity_cpu import CARRIERS
from benchmarks.place_stream import ask
from controlplane.monitor.settings import MonitorSettings
from engine_worker.settings import WorkerSettings
from mesh.membership import Directory, Member
from mesh.rpc.client import open_channel
from mesh.runtime import GrpcTransport, system_runtime
from mesh.store import open_store
from penstock.v1 import scheduler_pb2, scheduler_pb2_grpc

START_TIMEOUT_S: Final = 300.0
SNAPSHOTS: Final = 10
SNAPSHOT_PAUSE_S: Final = 0.37
"""No multiple of a report interval."""
PROMPT_BLOCKS: Final = 60


def cores_used(processes: list[Process], seconds: float) -> dict[str, float]:
    """Cores that all processes of each role use from now on."""
    before = {each.pid: each.cpu_s() for each in processes}
    start_s = time.monotonic()
    time.sleep(seconds)
    elapsed_s = time.monotonic() - start_s
    used: dict[str, float] = {}
    for each in processes:
        used[each.role] = used.get(each.role, 0.0) + (each.cpu_s() - before[each.pid]) / elapsed_s
    return used


async def snapshot_of(address: str) -> scheduler_pb2.GetSnapshotResponse:
    """What a scheduler knows now."""
    async with open_channel(GrpcTransport(), address, "scheduler") as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)  # type: ignore[no-untyped-call]
        answer: scheduler_pb2.GetSnapshotResponse = await stub.GetSnapshot(
            scheduler_pb2.GetSnapshotRequest(), timeout=START_TIMEOUT_S
        )
        return answer


def report_ages_ms(snapshot: scheduler_pb2.GetSnapshotResponse) -> list[float]:
    """How old the newest report of each instance is."""
    made_ms = now_ms()
    return [made_ms - each.load.prefilled_tokens_total / PREFILLED_PER_MS for each in snapshot.instances]


async def schedulers_in(store_url: str, count: int) -> tuple[Member, ...]:
    """Their records, once they are there."""
    store = open_store(store_url, system_runtime())
    directory = Directory(store)
    await directory.start()
    try:
        return await directory.wait_for("scheduler", count, START_TIMEOUT_S)
    finally:
        await directory.stop()
        await store.close()


def is_known(snapshot: scheduler_pb2.GetSnapshotResponse, instances: int, blocks: int) -> bool:
    """Whether a scheduler has heard of all instances and of nearly all their blocks."""
    held = sum(each.cached_blocks for each in snapshot.instances)
    ready = sum(each.state == "ready" for each in snapshot.instances)
    return snapshot.synced and ready == instances and held >= 0.99 * blocks


def wait_until_known(address: str, instances: int, blocks: int) -> float:
    """Return once a scheduler knows all; how many seconds that took."""
    start_s = time.monotonic()
    while not is_known(asyncio.run(snapshot_of(address)), instances, blocks):
        if time.monotonic() - start_s > START_TIMEOUT_S:
            raise click.ClickException(f"the fleet was not known within {START_TIMEOUT_S:g} s")
        time.sleep(1)
    return time.monotonic() - start_s


def staleness(address: str) -> dict[str, float]:
    """Ages of reports over some snapshots, and how many instances counted as stale."""
    ages: list[float] = []
    stale = 0
    for _ in range(SNAPSHOTS):
        snapshot = asyncio.run(snapshot_of(address))
        ages += report_ages_ms(snapshot)
        stale += sum(each.state == "stale" for each in snapshot.instances)
        time.sleep(SNAPSHOT_PAUSE_S)
    return {
        "median_ms": statistics.median(ages),
        "p99_ms": float(np.percentile(ages, 99)),
        "worst_ms": max(ages),
        "stale": stale / SNAPSHOTS,
    }


def calls_per_s(pipe: Connection, seconds: float) -> dict[str, float]:
    """Of each method of the store."""
    pipe.send("calls")
    before = pipe.recv()
    time.sleep(seconds)
    pipe.send("calls")
    return {method: (total - before.get(method, 0)) / seconds for method, total in pipe.recv().items()}


@click.command()
@click.option("--instances", default=1000, show_default=True)
@click.option("--kv-blocks", default=25_000, show_default=True, help="Of each instance, all of them cached.")
@click.option("--monitors", default=1, show_default=True)
@click.option("--schedulers", default=1, show_default=True)
@click.option("--processes", default=2, show_default=True, help="That play the instances.")
@click.option("--streams", type=click.Choice(list(CARRIERS)), default="tcp", show_default=True)
@click.option("--slowdown", default=1.0, show_default=True, help="Reports and requests come so many times less often.")
@click.option(
    "--max-reports-per-s",
    default=MonitorSettings().max_reports_per_s,
    show_default=True,
    help="That a monitor asks of all instances together.",
)
@click.option("--seconds", default=20.0, show_default=True, help="Of each measurement.")
@click.option("--placements", default=100.0, show_default=True, help="A second, in the second measurement.")
@click.option("--seed", default=1, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures to this file.")
def main(
    instances: int,
    kv_blocks: int,
    monitors: int,
    schedulers: int,
    processes: int,
    streams: str,
    slowdown: float,
    max_reports_per_s: float,
    seconds: float,
    placements: float,
    seed: int,
    json_path: Path | None,
) -> None:
    """Measure monitors and schedulers with a fleet of busy instances."""
    os.environ["PENSTOCK_FRAMED_STREAMS"] = CARRIERS[streams]
    blocks = instances * kv_blocks
    settings = WorkerSettings(
        MODEL,
        "",
        report_interval_ms=round(WorkerSettings("", "").report_interval_ms * slowdown),
        heartbeat_ms=round(WorkerSettings("", "").heartbeat_ms * slowdown),
    )
    interval_s = max(settings.report_interval_ms / 1000, slowdown * instances / max_reports_per_s)
    figures: dict[str, Any] = {
        "instances": instances,
        "blocks": blocks,
        "slowdown": slowdown,
        "streams": streams,
        "seconds": seconds,
        "report_interval_ms": 1000 * interval_s / slowdown,
    }
    with ExitStack() as stack:
        store, store_pid = stack.enter_context(a_child(serve_store))
        url = store.recv()
        roles = [Process("store", store_pid)]
        for number in range(monitors):
            bounds = (
                *("--stale-s", f"{slowdown * MonitorSettings().stale_s:g}"),
                *("--max-reports-per-s", f"{max_reports_per_s / slowdown:g}"),
            )
            roles.append(Process("monitor", stack.enter_context(a_role("monitor", f"monitor-{number}", url, *bounds))))
        for number in range(schedulers):
            options = ("--max-indexed-blocks", str(blocks + blocks // 10))
            pid = stack.enter_context(a_role("scheduler", f"scheduler-{number}", url, *options))
            roles.append(Process("scheduler", pid))
        addresses = [each.address for each in asyncio.run(schedulers_in(url, schedulers))]
        firsts = [instances * part // processes for part in range(processes + 1)]
        players = [
            stack.enter_context(
                a_child(play, Share(url, first, end - first, kv_blocks, settings, slowdown, interval_s), seed)
            )
            for first, end in itertools.pairwise(firsts)
        ]
        for pipe, _ in players:
            pipe.recv()
        figures["known_after_s"] = max(wait_until_known(each, instances, blocks) for each in addresses)
        played = [Process("instances", pid) for _, pid in players]
        figures["cores"] = cores_used(roles + played, seconds)
        figures["at_full_speed"] = {role: slowdown * used for role, used in figures["cores"].items()}
        figures["report_age"] = staleness(addresses[0])
        figures["memory_mb"] = {each.role: each.memory_bytes() / 1e6 for each in roles}
        members, _ = stack.enter_context(a_child(keep_members, url, instances))
        members.recv()
        figures["store"] = {
            "cores": cores_used(roles[:1], seconds)["store"],
            "calls_per_s": calls_per_s(store, seconds),
        }
        chains = [block_hashes(number % instances, 0, PROMPT_BLOCKS) for number in range(200)]
        figures["placing"] = asyncio.run(ask(addresses[0], chains, seconds / 2, placements))
    figures["control_plane_cores"] = sum(figures["at_full_speed"][role] for role in ("monitor", "scheduler"))
    click.echo(json.dumps(figures, indent=2))
    if json_path:
        json_path.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
