"""How commands reach the processes of a running mesh."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mesh.errors import PeerUnavailable, RpcError, StoreUnavailable
from mesh.leadership import leaders
from mesh.membership import MEMBERS_PREFIX, Directory, Member
from mesh.rpc.client import open_channel, rpc_error
from mesh.run_file import find_store_url
from mesh.runtime import GrpcTransport, Transport, system_runtime
from mesh.store import open_store
from mesh.store.interface import StateStore

T = TypeVar("T")
TCP = GrpcTransport()
CALL_DEADLINE_S = 3.0
PROBE_DEADLINE_S = 1.0
DIRECTORY_DEADLINE_S = 5.0
MESH_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def mesh_name(_: click.Context, parameter: click.Parameter, name: str) -> str:
    """Callback of the options that name a mesh on this machine; its run file and its logs are called so."""
    if not MESH_NAME.fullmatch(name):
        raise click.BadParameter(
            f"{name!r} is no name of a mesh: letters, digits, dots, dashes and underscores, 64 at most",
            param=parameter,
        )
    return name


def store_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The two options by which a command finds its mesh."""
    mesh = click.option(
        "--mesh", callback=mesh_name, default="default", show_default=True, help="Name of a mesh on this machine."
    )
    store = click.option("--store", help="State store of the mesh; default: PENSTOCK_STORE, then the local mesh's.")
    return store(mesh(function))


@asynccontextmanager
async def mesh_store(store: str | None, mesh: str) -> AsyncIterator[StateStore]:
    """The mesh's state store. Raises ConfigurationError if there is no mesh to be found."""
    opened = open_store(find_store_url(store, mesh), system_runtime())
    try:
        yield opened
    finally:
        await opened.close()


@asynccontextmanager
async def mesh_directory(store: StateStore) -> AsyncIterator[Directory]:
    """The present members of the mesh, without waiting: raises `StoreUnavailable` where a role would wait for the
    store."""
    await store.range(MEMBERS_PREFIX)
    directory = Directory(store)
    try:
        async with asyncio.timeout(DIRECTORY_DEADLINE_S):
            await directory.start()
    except TimeoutError:
        await directory.stop()
        raise StoreUnavailable(
            f"the state store did not list the members of the mesh within {DIRECTORY_DEADLINE_S:g} s; is it running?"
        ) from None
    try:
        yield directory
    finally:
        await directory.stop()


def only_member(directory: Directory, role: str) -> Member:
    """Some member with the role. Raises PeerUnavailable if there is none."""
    members = directory.members(role)
    if not members:
        raise PeerUnavailable(f"no {role} has joined the mesh; is `penstock serve {role}` running?")
    return members[0]


async def answering_member(
    directory: Directory, store: StateStore, role: str, duty: str = "", transport: Transport = TCP
) -> Member:
    """A member with the role that answers: the leader of `duty` if it does, else the next by name. Raises
    PeerUnavailable if there is none, and what stands in the way of the last one if none answers."""
    first = only_member(directory, role)
    leader = (await leaders(store)).get(duty)
    in_turn = sorted(directory.members(role), key=lambda member: leader is None or member.member_id != leader.member_id)
    if len(in_turn) == 1:
        return first
    for member in in_turn[:-1]:
        try:
            request = health_pb2.HealthCheckRequest()
            await call(member, health_pb2_grpc.HealthStub, "Check", request, PROBE_DEADLINE_S, transport)
            return member
        except RpcError:
            continue
    return in_turn[-1]


async def call(
    member: Member,
    stub_class: Callable[[Any], Any],
    method: str,
    request: Any,
    deadline_s: float = CALL_DEADLINE_S,
    transport: Transport = TCP,
) -> Any:
    """One unary call to a member, with a deadline. Raises RpcError."""
    async with open_channel(transport, member.address) as channel:
        try:
            return await getattr(stub_class(channel), method)(request, timeout=deadline_s)
        except grpc.aio.AioRpcError as error:
            raise rpc_error(error, f"{member.role} {member.member_id} at {member.address}") from error


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine on an event loop of its own."""
    return asyncio.run(work)
