"""What is done to a worker."""

import os
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from mesh.errors import PeerUnavailable
from mesh.membership import Member
from penstock.v1 import worker_pb2, worker_pb2_grpc
from services.cli.chaos.verdict import Fault
from services.cli.connection import call


def victims(workers: Sequence[Member], instance_ids: Iterable[str], count: int) -> list[Member]:
    """The `count` workers on which most streams began. Raises PeerUnavailable if none would be left over."""
    if count >= len(workers):
        raise PeerUnavailable(f"{count} of {len(workers)} workers cannot be broken: at least one has to be left")
    streams = Counter(instance_ids)
    return sorted(workers, key=lambda worker: (-streams[worker.member_id], worker.member_id))[:count]


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
