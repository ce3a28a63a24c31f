"""Channels to other processes of the mesh: keep-alive, bounded messages, a deadline on every unary call."""

from collections.abc import Callable
from typing import Any

import grpc

from mesh.errors import DeadlineExceeded, PeerUnavailable, RpcError
from mesh.rpc.limits import CHANNEL_OPTIONS, DEFAULT_DEADLINE_S
from mesh.runtime import Transport


class DefaultDeadline(grpc.aio.UnaryUnaryClientInterceptor):
    """Gives a unary call that brought no deadline the default one. Streams live as long as both ends do; what
    crosses them has deadlines of its own."""

    async def intercept_unary_unary(
        self,
        continuation: Callable[[grpc.aio.ClientCallDetails, Any], Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        """Called by gRPC for each unary call."""
        if client_call_details.timeout is None:
            client_call_details = client_call_details._replace(timeout=DEFAULT_DEADLINE_S)
        return await continuation(client_call_details, request)


def open_channel(transport: Transport, address: str, role: str = "") -> grpc.aio.Channel:
    """A channel to host:port. It connects when first used and reconnects by itself; close it when done. `role`: whom
    its calls are for, and nobody else is to get them; empty: any process of the mesh."""
    return transport.channel(address, CHANNEL_OPTIONS, [DefaultDeadline()], role)


def rpc_error(error: grpc.aio.AioRpcError, peer: str) -> RpcError:
    """The mesh's own error for a failed call to `peer` (role and address, for the message)."""
    detail = error.details() or error.code().name
    match error.code():
        case grpc.StatusCode.UNAVAILABLE:
            return PeerUnavailable(f"{peer} cannot be reached ({detail}); is it running?")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"{peer} did not answer within the deadline; it may be overloaded or hung")
        case code:
            return RpcError(f"{peer} answered {code.name}: {detail}")
