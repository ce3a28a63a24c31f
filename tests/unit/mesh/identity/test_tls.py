"""Real servers and clients with certificates of several authorities: who gets in, and who does not."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from mesh.errors import ConfigurationError, StoreRefused, StoreUnavailable
from mesh.identity.files import IdentityFolder
from mesh.identity.tls import RenewingChannel, TlsTransport
from mesh.role import RoleSettings, _transport
from mesh.rpc.client import open_channel
from mesh.rpc.framed.sockets import is_loopback
from mesh.rpc.server import RpcServer
from mesh.runtime import GrpcTransport, Transport, system_runtime
from mesh.store import open_store
from penstock.v1 import member_pb2, member_pb2_grpc, predictor_pb2, predictor_pb2_grpc
from services.cli.supervisor.state_server import StateServer
from tests.unit.mesh.identity.identities import an_authority, issued, transport

pytestmark = pytest.mark.live

REFUSED = grpc.StatusCode.PERMISSION_DENIED
UNREACHABLE = grpc.StatusCode.UNAVAILABLE


class Restarts(member_pb2_grpc.MemberServicer):
    """Restarts nothing."""

    async def Restart(self, request: member_pb2.RestartRequest, context: object) -> member_pb2.RestartResponse:
        return member_pb2.RestartResponse()


class States(predictor_pb2_grpc.LengthPredictionServicer):
    """Has no state."""

    async def GetState(
        self, request: predictor_pb2.GetPredictionStateRequest, context: object
    ) -> predictor_pb2.GetPredictionStateResponse:
        return predictor_pb2.GetPredictionStateResponse()


@asynccontextmanager
async def serving(by: Transport) -> AsyncIterator[RpcServer]:
    server = RpcServer(by)
    server.add(member_pb2_grpc.add_MemberServicer_to_server, Restarts(), "penstock.v1.Member")
    server.add(predictor_pb2_grpc.add_LengthPredictionServicer_to_server, States(), "penstock.v1.LengthPrediction")
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


async def restarted(channel: grpc.aio.Channel) -> grpc.StatusCode:
    """How a call ended that only operators may make."""
    stub = member_pb2_grpc.MemberStub(channel)  # type: ignore[no-untyped-call]
    try:
        await stub.Restart(member_pb2.RestartRequest(), timeout=10)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def asked(client: Transport, address: str, role: str = "worker") -> grpc.StatusCode:
    async with open_channel(client, address, role) as channel:
        return await restarted(channel)


async def test_each_role_gets_in_where_it_may_and_nobody_else_does(tmp_path: Path) -> None:
    ours, theirs = an_authority(tmp_path, "mesh"), an_authority(tmp_path, "other")
    operator = transport(ours, tmp_path, "operator")
    async with serving(transport(ours, tmp_path, "worker", "w-0")) as worker:
        assert await asked(operator, worker.address) is grpc.StatusCode.OK
        assert await asked(transport(ours, tmp_path, "frontend"), worker.address) is REFUSED
        assert await asked(GrpcTransport(), worker.address) is UNREACHABLE, "no certificate"
        stranger = transport(theirs, tmp_path / "theirs", "operator")
        assert await asked(stranger, worker.address) is UNREACHABLE, "another authority's"
        assert await asked(operator, worker.address, "scheduler") is UNREACHABLE, "a worker is no scheduler"
        assert await asked(operator, worker.address, "") is grpc.StatusCode.OK, "any member"
    async with serving(GrpcTransport()) as rogue:
        assert await asked(operator, rogue.address) is UNREACHABLE, "a server without a certificate hears nothing"


async def test_another_trust_domain_is_refused_though_its_authority_is_the_same(tmp_path: Path) -> None:
    ours, theirs = an_authority(tmp_path, "mesh"), an_authority(tmp_path, "other")
    worker, operator = issued(ours, tmp_path / "w", "worker"), issued(theirs, tmp_path / "o", "operator")
    both = b"".join((authority.folder / "ca.pem").read_bytes() for authority in (ours, theirs))
    for folder in (worker, operator):
        (folder / "ca.pem").write_bytes(both)
    async with serving(TlsTransport(IdentityFolder(worker))) as server:
        assert await asked(TlsTransport(IdentityFolder(operator)), server.address) is REFUSED


async def test_an_expired_certificate_opens_nothing(tmp_path: Path) -> None:
    authority = an_authority(tmp_path)
    expired = issued(authority, tmp_path / "o", "operator", ago=timedelta(days=2), days=1)
    async with serving(transport(authority, tmp_path, "worker")) as server:
        assert await asked(TlsTransport(IdentityFolder(expired)), server.address) is UNREACHABLE


async def test_an_authority_is_replaced_without_a_restart(tmp_path: Path) -> None:
    """In three steps, as with any authority: both believed, certificates of the new one, only the new one believed."""
    old, new = an_authority(tmp_path, "mesh"), an_authority(tmp_path / "new", "mesh")
    folders = {role: issued(old, tmp_path / role, role) for role in ("worker", "operator")}
    both = b"".join((authority.folder / "ca.pem").read_bytes() for authority in (old, new))
    operator = TlsTransport(IdentityFolder(folders["operator"]))
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(TlsTransport(IdentityFolder(folders["worker"]))))
        kept = await stack.enter_async_context(open_channel(operator, server.address, "worker"))
        assert isinstance(kept, RenewingChannel)
        stub = member_pb2_grpc.MemberStub(kept)  # type: ignore[no-untyped-call]
        for believed in (both, both, (new.folder / "ca.pem").read_bytes()):
            for role, folder in folders.items():
                issued(new if believed is not both else old, folder, role)
                (folder / "ca.pem").write_bytes(believed)
            await stub.Restart(member_pb2.RestartRequest(), timeout=10)
            assert await asked(operator, server.address) is grpc.StatusCode.OK
        left_out = transport(old, tmp_path / "old", "operator")
        assert await asked(left_out, server.address) is UNREACHABLE


async def test_the_store_is_written_by_those_whose_keys_they_are(tmp_path: Path) -> None:
    authority = an_authority(tmp_path)
    server = await StateServer.start(system_runtime(transport(authority, tmp_path, "store")), None)

    async def write(by: Transport, key: str) -> None:
        store = open_store(server.url, system_runtime(by))
        try:
            await store.put(key, b"x")
            assert (await store.get(key)) is not None
            await store.delete(key)
        finally:
            await store.close()

    try:
        worker = transport(authority, tmp_path, "worker", "w-0")
        await write(worker, "/penstock/members/worker/w-0")
        for key in ("/penstock/members/worker/w-1", "/penstock/members/scheduler/s", "/penstock/config/policy"):
            with pytest.raises(StoreRefused, match="may not write"):
                await write(worker, key)
        await write(transport(authority, tmp_path, "operator"), "/penstock/config/policy")
        with pytest.raises(StoreRefused, match="may not call"):
            await write(transport(authority, tmp_path, "envoy"), "/penstock/members/envoy/e")
        rogue = open_store(server.url, system_runtime())
        with pytest.raises(StoreUnavailable):
            await rogue.get("/penstock/members/", timeout_s=1)
        await rogue.close()
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("host", "insecure", "starts"),
    [("127.0.0.1", False, True), ("::1", False, True), ("0.0.0.0", False, False), ("0.0.0.0", True, True)],
)
def test_without_an_identity_nothing_listens_where_strangers_are(host: str, insecure: bool, starts: bool) -> None:
    settings = RoleSettings("embedded:", "w-0", bind_host=host, insecure=insecure)
    if starts:
        assert _transport("worker", settings).identity is None
        return
    with pytest.raises(ConfigurationError, match="say --insecure"):
        _transport("worker", settings)


def test_an_identity_of_one_member_is_no_others(tmp_path: Path) -> None:
    folder = issued(an_authority(tmp_path), tmp_path / "w", "worker", "w-0")
    assert _transport("worker", RoleSettings("embedded:", "w-0", bind_host="0.0.0.0", identity=str(folder))).identity
    with pytest.raises(ConfigurationError, match="this process is w-1"):
        _transport("worker", RoleSettings("embedded:", "w-1", identity=str(folder)))


@pytest.mark.parametrize(
    ("host", "is_local"), [("localhost", True), ("127.0.0.2", True), ("[::1]", True), ("::", False), ("gpu-1", False)]
)
def test_which_addresses_are_this_machines_alone(host: str, is_local: bool) -> None:
    assert is_loopback(host) is is_local
