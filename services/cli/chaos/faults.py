"""What is done to a worker."""

import asyncio
import os
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

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
    """Break it now."""
    match fault:
        case "kill":
            os.kill(pid_of(worker), signal.SIGKILL)
        case "hang":
            os.kill(pid_of(worker), signal.SIGSTOP)
        case "drain":
            await call(worker, worker_pb2_grpc.WorkerStub, "Drain", worker_pb2.DrainRequest(migrate=True))


@contextmanager
def woken_at_the_end(fault: Fault, workers: Iterable[Member]) -> Iterator[None]:
    """Stopped processes go on afterwards, so that they can be ended in peace."""
    try:
        yield
    finally:
        for worker in workers if fault == "hang" else ():
            os.kill(pid_of(worker), signal.SIGCONT)


def pid_of(worker: Member) -> int:
    """Its process, as it announced it."""
    return int(worker.attributes["pid"])
