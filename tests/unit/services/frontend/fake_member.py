"""A member of the mesh that answers what every process answers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
from prometheus_client import CollectorRegistry, Gauge

from mesh.membership import ChangeKind, Member, MemberChange
from mesh.metric_families import metric_families
from mesh.rpc.server import RpcServer
from mesh.runtime import GrpcTransport
from penstock.v1 import member_pb2, member_pb2_grpc


@dataclass
class FakeMember(member_pb2_grpc.MemberServicer):
    """A process that says its metrics: of a worker, the two gauges of its load."""

    member_id: str
    usage: float = 0.0
    waiting: float = 0.0
    model: str = "m"
    role: str = "worker"
    is_former: bool = False
    """Of a release without the RPC."""
    asked: int = 0
    address: str = ""

    async def GetMetrics(
        self, request: member_pb2.GetMetricsRequest, context: grpc.aio.ServicerContext
    ) -> member_pb2.GetMetricsResponse:
        self.asked += 1
        if self.is_former:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")
        registry = CollectorRegistry()
        if self.role == "worker":
            for name, value in (("kv_cache_usage_perc", self.usage), ("num_requests_waiting", self.waiting)):
                Gauge(f"vllm:{name}", "Load", ["model_name"], registry=registry).labels(self.model).set(value)
        Gauge("penstock_own", "Nobody else's", registry=registry)
        return member_pb2.GetMetricsResponse(families=metric_families(registry, request.prefix, self.member_id))

    @asynccontextmanager
    async def served(self) -> AsyncIterator[None]:
        """Answers at its address."""
        server = RpcServer(GrpcTransport())
        server.add(member_pb2_grpc.add_MemberServicer_to_server, self, "penstock.v1.Member")
        await server.start()
        self.address = server.address
        try:
            yield
        finally:
            await server.stop(0)

    def change(self, kind: ChangeKind, life: str = "1") -> MemberChange:
        return MemberChange(kind, Member(self.role, self.member_id, life, self.address, ""))
