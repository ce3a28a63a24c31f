"""A real server that has every method there is, and somebody of every role who knocks at each of them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from mesh.identity.doors import DOORS
from mesh.identity.identity import ROLES
from mesh.rpc.client import open_channel
from mesh.runtime import Transport
from tests.unit.mesh.identity.identities import an_authority, transport

pytestmark = pytest.mark.live

UNKNOWN = "/penstock.v1.Worker/NoSuchMethod"


class Everything(grpc.GenericRpcHandler):
    """Serves whatever is called."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def serve(request: bytes, context: Any) -> bytes:
            return b""

        return grpc.unary_unary_rpc_method_handler(serve)


@asynccontextmanager
async def serving(by: Transport) -> AsyncIterator[str]:
    server = by.server((), ())
    server.add_generic_rpc_handlers((Everything(),))
    port = by.listen(server, "127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_each_door_is_open_to_its_roles_and_operators_and_to_nobody_else(tmp_path: Path) -> None:
    authority = an_authority(tmp_path)
    async with serving(transport(authority, tmp_path, "monitor")) as address:
        for role in ROLES:
            async with open_channel(transport(authority, tmp_path / "clients", role), address) as channel:
                opened = {method for method in (*DOORS, UNKNOWN) if await _is_open(channel, method)}
            expected = {method for method, roles in DOORS.items() if role in roles or role == "operator"}
            assert opened == expected, role


async def _is_open(channel: grpc.aio.Channel, method: str) -> bool:
    try:
        await channel.unary_unary(method)(b"", timeout=30)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.PERMISSION_DENIED:
            return False
        raise
    return True
