"""What is done to a worker."""

import asyncio
import os
import signal
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from mesh.errors import PeerUnavailable
from mesh.membership import Member
from penstock.v1 import worker_pb2, worker_pb2_grpc
from services.cli.chaos.verdict import Fault
from services.cli.connection import call


def victims(workers: Sequence[Member], requests: Mapping[str, int], count: int) -> list[Member]:
    """The `count` workers that have most requests now. Raises PeerUnavailable if none would be left over."""
    if count >= len(workers):
        raise PeerUnavailable(f"{count} of {len(workers)} workers cannot be broken: at least one has to be left")
    return sorted(workers, key=lambda worker: (-requests[worker.member_id], worker.member_id))[:count]


async def requests_of(workers: Sequence[Member]) -> dict[str, int]:
    """How many requests each worker has: where a stream began is not where it is, once requests move."""
    answers = await asyncio.gather(
        *(call(worker, worker_pb2_grpc.WorkerStub, "GetLoad", worker_pb2.GetLoadRequest()) for worker in workers)
    )
    return {
        worker.member_id: answer.load.running_requests + answer.load.queued_requests
        for worker, answer in zip(workers, answers, strict=True)
    }


async def inject(fault: Fault, worker: Member) -> None:
    """Break it now. Raises PeerUnavailable if its process is not on this machine, or no more."""
    match fault:
        case "kill":
            _signal(worker, signal.SIGKILL)
        case "hang":
            _signal(worker, signal.SIGSTOP)
        case "drain":
            await call(worker, worker_pb2_grpc.WorkerStub, "Drain", worker_pb2.DrainRequest(migrate=True))


@contextmanager
def woken_at_the_end(fault: Fault, workers: Iterable[Member]) -> Iterator[None]:
    """Stopped processes go on afterwards, so that they can be ended in peace."""
    try:
        yield
    finally:
        for worker in workers if fault == "hang" else ():
            with suppress(PeerUnavailable):  # it may have been killed, or never stopped
                _signal(worker, signal.SIGCONT)


def _signal(worker: Member, number: signal.Signals) -> None:
    """To its process, as it announced it: a number that means another process on another machine."""
    host = worker.address.rpartition(":")[0].strip("[]")
    if not _is_here(host):
        raise PeerUnavailable(f"worker {worker.member_id} is at {host}, not on this machine: run penstock chaos there")
    try:
        os.kill(int(worker.attributes["pid"]), number)
    except ProcessLookupError as error:
        raise PeerUnavailable(f"the process of worker {worker.member_id} is gone") from error


def _is_here(host: str) -> bool:
    try:
        family, kind, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
