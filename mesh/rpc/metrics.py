"""Counts every call a server answers, by method and status."""

from collections.abc import Awaitable, Callable

import grpc
from prometheus_client import CollectorRegistry, Counter


class RpcMetrics(grpc.aio.ServerInterceptor):
    """`penstock_rpc_calls_total{method}`: calls as they arrive. A stream counts once; what crosses it is
    counted by the role that serves it, because wrapping every message would cost more than the message."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._calls = Counter("penstock_rpc_calls", "Calls that arrived", ["method"], registry=registry)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Called by gRPC for each call."""
        self._calls.labels(handler_call_details.method).inc()
        return await continuation(handler_call_details)
