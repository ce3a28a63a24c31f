"""The faults of `penstock chaos`: how each is injected into a running mesh, and when the mesh counts as healed."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from mesh.errors import PeerUnavailable
from mesh.membership import MEMBERS_PREFIX, Directory, Member
from mesh.store.interface import StateStore
from penstock.v1 import worker_pb2, worker_pb2_grpc
from services.cli.chaos.processes import send_signal
from services.cli.chaos.verdict import Fault
from services.cli.connection import call
from services.cli.restarting import ROLLING_ORDER, RestartTimeouts, in_rolling_order, missing, restart, restart_in_turn

CUT_S = 8.0
"""How long monitors stay silent: longer than reports take to go stale (2 s) and leases to run out (5 s)."""
POLL_S = 0.2

START_TIMEOUTS = RestartTimeouts(drain_s=None, start_s=120.0)
PAUSE_BETWEEN_S = 1.0
"""Between two injections of one fault that is asked for several times."""
AFTERMATH_S = 8.0
"""After a fault of the control plane: what it breaks may show only when leases and graces (5 s) have run out."""


COME_BACK: frozenset[Fault] = frozenset(("kill", "restart"))
"""Faults of workers that may hit all of them: who runs them starts them again, and requests wait."""


@dataclass(frozen=True)
class TargetMesh:
    """The mesh that faults are injected into."""

    directory: Directory
    store: StateStore
    model: str
    say: Callable[[str], None]

    @property
    def workers(self) -> list[Member]:
        """Live workers of the model that the streams ask for."""
        members = self.directory.members("worker")
        return [worker for worker in members if worker.attributes.get("model") == self.model]


@asynccontextmanager
async def broken(fault: Fault, count: int, target: TargetMesh) -> AsyncIterator[None]:
    """Inside, the fault is in force, or has been; afterwards what does not heal by itself is mended.

    Raises PeerUnavailable where a process is not on this machine, is gone, or is the last that could go on.
    """
    stopped: list[Member] = []
    try:
        await _INJECTORS[fault](target, count, stopped)
        yield
    finally:
        # Stopped processes go on afterwards, so that they can be ended in peace.
        for member in stopped:
            with suppress(PeerUnavailable):  # it may have been killed meanwhile
                send_signal(member, signal.SIGCONT)


async def healed(directory: Directory, before: frozenset[str], timeout_s: float) -> list[str]:
    """Wait until nothing is missing in the mesh that was not missing before; returns what still is in the end."""
    try:
        async with asyncio.timeout(timeout_s):
            while await missing(directory) - before:  # noqa: ASYNC110  other processes set no event here
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        return sorted(await missing(directory) - before)
    return []


def victims(members: Sequence[Member], requests: Mapping[str, int], count: int, spared: int = 1) -> list[Member]:
    """The `count` that have most requests now. Raises PeerUnavailable if fewer than `spared` would be left over."""
    if count > len(members) - spared:
        role = members[0].role if members else "member"
        raise PeerUnavailable(f"{count} of {len(members)} {role}s cannot be broken: {spared} of them must be left")
    return sorted(members, key=lambda member: (-requests.get(member.member_id, 0), member.member_id))[:count]


async def requests_of(workers: Sequence[Member]) -> dict[str, int]:
    """How many requests each worker has: where a stream began is not where it is, once requests move."""
    answers = await asyncio.gather(
        *(call(worker, worker_pb2_grpc.WorkerStub, "GetLoad", worker_pb2.GetLoadRequest()) for worker in workers)
    )
    return {
        worker.member_id: answer.load.running_requests + answer.load.queued_requests
        for worker, answer in zip(workers, answers, strict=True)
    }


async def _busiest(target: TargetMesh, count: int, doing: Fault) -> list[Member]:
    workers = target.workers
    requests = await requests_of(workers)
    chosen = victims(workers, requests, count, spared=0 if doing in COME_BACK else 1)
    for worker in chosen:
        target.say(f"{doing} {worker.member_id}, where {requests[worker.member_id]} requests run")
    return chosen


async def _kill(target: TargetMesh, count: int, stopped: list[Member]) -> None:
    for worker in await _busiest(target, count, "kill"):
        send_signal(worker, signal.SIGKILL)


async def _hang(target: TargetMesh, count: int, stopped: list[Member]) -> None:
    for worker in await _busiest(target, count, "hang"):
        stopped.append(worker)
        send_signal(worker, signal.SIGSTOP)


async def _drain(target: TargetMesh, count: int, stopped: list[Member]) -> None:
    for worker in await _busiest(target, count, "drain"):
        await call(worker, worker_pb2_grpc.WorkerStub, "Drain", worker_pb2.DrainRequest(migrate=True))


async def _restart(target: TargetMesh, count: int, stopped: list[Member]) -> None:
    for worker in await _busiest(target, count, "restart"):
        await restart(target.directory, worker, START_TIMEOUTS, target.say)


async def _rolling(target: TargetMesh, count: int, stopped: list[Member]) -> None:
    for _ in range(count):
        members = [member for role in ROLLING_ORDER for member in target.directory.members(role)]
        await restart_in_turn(target.directory, in_rolling_order(members), START_TIMEOUTS, target.say)


async def _delete_members(target: TargetMesh, count: int, stopped: list[Member]) -> None:
    for _ in range(count):
        deleted = await target.store.delete_prefix(MEMBERS_PREFIX)
        target.say(f"deleted the records of {deleted} members, whose leases live on")
        await asyncio.sleep(PAUSE_BETWEEN_S)
    await asyncio.sleep(AFTERMATH_S)


async def _cut_monitor(target: TargetMesh, count: int, stopped: list[Member]) -> None:
    for _ in range(count):
        monitors = target.directory.members("monitor")
        target.say(f"no word from {len(monitors)} monitors for {CUT_S:g} s")
        for monitor in monitors:
            stopped.append(monitor)
            send_signal(monitor, signal.SIGSTOP)
        await asyncio.sleep(CUT_S)
        for monitor in monitors:
            send_signal(monitor, signal.SIGCONT)
        target.say("the monitors go on")
        await asyncio.sleep(AFTERMATH_S)


def _kill_of(role: str) -> "_Injector":
    async def kill(target: TargetMesh, count: int, stopped: list[Member]) -> None:
        members = target.directory.members(role)
        for member in victims(members, {}, count) if role == "frontend" else members[:count]:
            target.say(f"kill {role} {member.member_id}")
            send_signal(member, signal.SIGKILL)
        await asyncio.sleep(AFTERMATH_S)

    return kill


async def _wipe_store(target: TargetMesh, count: int, stopped: list[Member]) -> None:
    kept = [entry for entry in (await target.store.range("/")).entries if not entry.incarnation_id]
    for _ in range(count):
        deleted = await target.store.delete_prefix("/")
        target.say(f"deleted all {deleted} keys of the state store")
        await asyncio.sleep(PAUSE_BETWEEN_S)
    # Settings are nobody's to announce again: without this, a policy or a cascade would be gone for good.
    for entry in kept:
        await target.store.put(entry.key, entry.value)
    target.say(f"put back {len(kept)} settings, as from a backup")
    await asyncio.sleep(AFTERMATH_S)


_Injector = Callable[[TargetMesh, int, list[Member]], Awaitable[None]]
"""Returns when the fault has happened, or is over where it lasts; adds whom it leaves stopped."""

_INJECTORS: Mapping[Fault, _Injector] = {
    "kill": _kill,
    "hang": _hang,
    "drain": _drain,
    "restart": _restart,
    "rolling": _rolling,
    "delete-members": _delete_members,
    "cut-monitor": _cut_monitor,
    "kill-frontend": _kill_of("frontend"),
    "kill-scheduler": _kill_of("scheduler"),
    "kill-monitor": _kill_of("monitor"),
    "wipe-store": _wipe_store,
}
