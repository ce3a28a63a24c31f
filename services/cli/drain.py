"""`penstock drain INSTANCE`: move everything away from an instance and end it."""

import asyncio
import json
import time
from typing import Any

import click

from mesh.errors import DeadlineExceeded, PeerUnavailable, RpcError
from mesh.membership import Directory, Member
from penstock.v1 import worker_pb2, worker_pb2_grpc
from services.cli.connection import call, mesh_directory, mesh_store, run, store_options

POLL_S = 0.1
TELL_S = 2.0


@click.command()
@click.argument("instance_id")
@click.option("--timeout-s", default=300.0, show_default=True, help="Seconds to wait for its end.")
@store_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(instance_id: str, timeout_s: float, store: str | None, mesh: str, as_json: bool) -> None:
    """Move every running request of INSTANCE_ID to other instances of its model, then end its process. Requests that
    cannot be moved finish there first. The supervisor of `penstock up` does not start it again."""
    drained = run(_drain(store, mesh, instance_id, timeout_s))
    if as_json:
        click.echo(json.dumps(drained, indent=2))
    else:
        click.echo(
            f"{instance_id} has left the mesh: {drained['running_requests']} requests ran on it, "
            f"{drained['duration_s']:.1f} s"
        )


async def _drain(store: str | None, mesh: str, instance_id: str, timeout_s: float) -> dict[str, Any]:
    async with mesh_store(store, mesh) as opened, mesh_directory(opened) as directory:
        member = _worker(directory, instance_id)
        began_s = time.monotonic()
        request = worker_pb2.DrainRequest(migrate=True)
        answer = await call(member, worker_pb2_grpc.WorkerStub, "Drain", request)
        telling = asyncio.create_task(_tell(member, answer.running_requests), name="what is left")
        try:
            async with asyncio.timeout(timeout_s):
                while member in directory.members("worker"):  # noqa: ASYNC110  the directory has no event for one member
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{instance_id} still has requests after {timeout_s:g} s; it goes on draining and ends after them"
            ) from None
        finally:
            telling.cancel()
        return {
            "instance_id": instance_id,
            "incarnation_id": member.incarnation_id,
            "running_requests": answer.running_requests,
            "duration_s": round(time.monotonic() - began_s, 3),
        }


async def _tell(member: Member, running: int) -> None:
    """Every two seconds, on stderr, how many requests are left and how long they may take, until cancelled."""
    clock = asyncio.get_running_loop().time
    began_s = clock()
    while True:
        await asyncio.sleep(TELL_S)
        try:
            listed = await call(member, worker_pb2_grpc.WorkerStub, "ListRequests", worker_pb2.ListRequestsRequest())
        except RpcError:
            return  # it is ending
        click.echo(left_line(running, len(listed.requests), clock() - began_s), err=True)


def left_line(running: int, left: int, gone_s: float) -> str:
    """How a drain goes: what is left, and how long that takes if it goes on as it has."""
    line = f"{left} of {running} requests are left after {gone_s:.0f} s"
    return f"{line}; about {gone_s * left / (running - left):.0f} s to go" if 0 < left < running else line


def _worker(directory: Directory, instance_id: str) -> Member:
    members = directory.members("worker")
    for member in members:
        if member.member_id == instance_id:
            return member
    known = ", ".join(member.member_id for member in members) or "none"
    raise PeerUnavailable(f"there is no instance {instance_id!r} in the mesh; there are: {known}")
