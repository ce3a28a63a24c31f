"""How commands reach the processes of a running mesh."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import click
import grpc
from click.core import ParameterSource
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mesh.errors import PeerUnavailable, RpcError, StoreUnavailable
from mesh.identity.identity import Identity
from mesh.identity.tls import transport_of
from mesh.leadership import leaders
from mesh.membership import MEMBERS_PREFIX, Directory, Member
from mesh.rpc.client import open_channel, rpc_error
from mesh.run_file import find_mesh
from mesh.runtime import GrpcTransport, Transport, system_runtime
from mesh.store import open_store
from mesh.store.interface import StateStore

T = TypeVar("T")
OPERATOR: Final = "operator"
CALL_DEADLINE_S = 3.0
PROBE_DEADLINE_S = 1.0
DIRECTORY_DEADLINE_S = 5.0
DEFAULT_MESH = "default"
MESH_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def mesh_name(_: click.Context, parameter: click.Parameter, name: str) -> str:
    """Callback of the options that name a mesh on this machine; its run file and its logs are called so."""
    if not MESH_NAME.fullmatch(name):
        raise click.BadParameter(
            f"{name!r} is no name of a mesh: letters, digits, dots, dashes and underscores, 64 at most",
            param=parameter,
        )
    return name


def given_before(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Callback of options that a group and its subcommands have: what was given before the subcommand holds for it,
    unless it was given behind it too."""
    assert parameter.name is not None, "an option has a name"
    group = {} if ctx.parent is None else ctx.parent.params
    if parameter.name in group and ctx.get_parameter_source(parameter.name) is ParameterSource.DEFAULT:
        return group[parameter.name]
    return value


def _mesh_of_command(ctx: click.Context, parameter: click.Parameter, name: str) -> str:
    return mesh_name(ctx, parameter, given_before(ctx, parameter, name))


mesh_option = click.option(
    "--mesh",
    callback=_mesh_of_command,
    default=DEFAULT_MESH,
    show_default=True,
    help="Name of a mesh on this machine.",
)


def store_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The two options by which a command finds its mesh."""
    store = click.option(
        "--store",
        callback=given_before,
        help="State store of the mesh; default: PENSTOCK_STORE, then the local mesh's.",
    )
    return store(mesh_option(function))


def same_mesh(store: str | None, mesh: str) -> str:
    """The options, with a space before them, by which commands of a hint reach the mesh that this one was told of."""
    if store:
        return f" --store {store}"
    return "" if mesh == DEFAULT_MESH else f" --mesh {mesh}"


class OperatorTransport:
    """The `Transport` of the commands of this process: that of an operator of the mesh which it has found."""

    def __init__(self) -> None:
        self._transport: Transport = GrpcTransport()

    def use(self, identity: str) -> None:
        """A folder of `find_mesh`; empty: plaintext. Raises ConfigurationError."""
        self._transport = transport_of(identity, OPERATOR)

    @property
    def identity(self) -> Identity | None:
        return self._transport.identity

    def channel(
        self, address: str, options: Sequence[tuple[str, Any]], interceptors: Sequence[Any], role: str = ""
    ) -> grpc.aio.Channel:
        return self._transport.channel(address, options, interceptors, role)

    def to_others(self) -> Transport:
        return self._transport.to_others()

    def server(self, options: Sequence[tuple[str, Any]], interceptors: Sequence[Any]) -> grpc.aio.Server:
        return self._transport.server(options, interceptors)

    def listen(self, server: grpc.aio.Server, bind: str) -> int:
        return self._transport.listen(server, bind)


AS_OPERATOR: Final = OperatorTransport()


@asynccontextmanager
async def mesh_store(store: str | None, mesh: str) -> AsyncIterator[StateStore]:
    """The mesh's state store; the command is its operator from then on. Raises ConfigurationError if there is no mesh
    to be found."""
    found = find_mesh(store, mesh)
    AS_OPERATOR.use(found.identity)
    opened = open_store(found.store_url, system_runtime(AS_OPERATOR))
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
    directory: Directory, store: StateStore, role: str, duty: str = "", transport: Transport = AS_OPERATOR
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
    transport: Transport = AS_OPERATOR,
) -> Any:
    """One unary call to a member, with a deadline. Raises RpcError."""
    async with open_channel(transport, member.address, member.role) as channel:
        try:
            return await getattr(stub_class(channel), method)(request, timeout=deadline_s)
        except grpc.aio.AioRpcError as error:
            raise rpc_error(error, f"{member.role} {member.member_id} at {member.address}") from error


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine on an event loop of its own."""
    return asyncio.run(work)
