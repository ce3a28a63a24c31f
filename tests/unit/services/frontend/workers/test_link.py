"""How long a link takes its worker for hung."""

from typing import Any

import pytest

from mesh.membership import Member
from mesh.runtime import GrpcTransport
from penstock.v1 import worker_pb2
from services.frontend.workers.link import WorkerLink
from services.frontend.workers.liveness import Hang


class NoRelays:
    """The worker has no request of this frontend."""

    def worker_lost(self, *_: Any, **__: Any) -> None:
        """Nothing is lost."""

    def deliver(self, *_: Any) -> None:
        """Nobody waits."""


def link_to_a_worker() -> WorkerLink:
    member = Member("worker", "worker-0", "first", "127.0.0.1:1", "", {"model": "m"})

    def ignore(*_: Any) -> None:
        return

    link = WorkerLink(member, "f", NoRelays(), lambda: 0.0, GrpcTransport(), ignore, ignore, ignore)  # type: ignore[arg-type]
    hello = worker_pb2.WorkerHello(instance_id="worker-0", incarnation_id="first")
    link._received(worker_pb2.WorkerMessage(hello=hello, heard_messages=1))
    assert link.is_connected
    return link


def heartbeat(heard: int) -> worker_pb2.WorkerMessage:
    return worker_pb2.WorkerMessage(heartbeat=worker_pb2.Heartbeat(), heard_messages=heard)


def step(heard: int) -> worker_pb2.WorkerMessage:
    return worker_pb2.WorkerMessage(step=worker_pb2.StepOutput(), heard_messages=heard)


@pytest.mark.parametrize(
    ("hang", "message", "is_over"),
    [
        (Hang.FROZEN, heartbeat(1), True),
        (Hang.STALLED, heartbeat(1), False),
        (Hang.STALLED, step(1), True),
        (Hang.DEAF, heartbeat(1), False),
        (Hang.DEAF, step(1), False),
        (Hang.DEAF, heartbeat(2), True),
    ],
)
async def test_a_hang_ends_with_its_own_sign_of_life(
    hang: Hang, message: worker_pb2.WorkerMessage, is_over: bool
) -> None:
    link = link_to_a_worker()
    link.note_hang(hang)
    assert not link.is_connected
    link._received(message)
    assert link.is_connected == is_over


@pytest.mark.parametrize("hang", [Hang.FROZEN, Hang.STALLED])
async def test_a_deaf_worker_that_hangs_as_well_is_deaf_afterwards(hang: Hang) -> None:
    link = link_to_a_worker()
    link.note_hang(Hang.DEAF)
    link.note_hang(hang)
    link._received(step(1))
    assert not link.is_connected
    link._received(step(2))
    assert link.is_connected
