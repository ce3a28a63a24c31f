"""The worker's gRPC service about KV transfers: a thin shell around its agent."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import NoReturn, Protocol, TypeAlias

import grpc

from engine_worker.kv.addresses import split_cores, split_ports
from engine_worker.kv.connection import PeerAddress
from engine_worker.kv.transfer import AgentDescription, AgentStatus, TransferStats
from mesh.errors import (
    ConfigurationError,
    DeadlineExceeded,
    KvBlockCorrupt,
    KvTransferFailed,
    KvTransferRefused,
    PeerUnavailable,
    PenstockError,
)
from mesh.rpc.server import RpcServer
from penstock.v1 import kv_transfer_pb2 as pb2
from penstock.v1 import kv_transfer_pb2_grpc

SERVICE_NAME = "penstock.v1.KvTransfer"
DEFAULT_DEADLINE_S = 5.0

Context: TypeAlias = grpc.aio.ServicerContext

_CODES: dict[type[PenstockError], grpc.StatusCode] = {
    ConfigurationError: grpc.StatusCode.FAILED_PRECONDITION,
    KvTransferRefused: grpc.StatusCode.FAILED_PRECONDITION,
    KvTransferFailed: grpc.StatusCode.ABORTED,
    PeerUnavailable: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    KvBlockCorrupt: grpc.StatusCode.DATA_LOSS,
}


class AgentPort(Protocol):
    """What the service asks of an agent, which may live in another process."""

    async def describe(self) -> AgentDescription:
        """The agent's identity, port and KV layout."""

    async def status(self) -> AgentStatus:
        """Its transfers that run and wait now, and totals since the start."""

    async def pull_reserved(
        self,
        peer: PeerAddress,
        transfer_id: str,
        source_block_ids: Sequence[int],
        target_block_ids: Sequence[int],
        deadline_s: float,
    ) -> TransferStats:
        """Pull into blocks that the engine has reserved under `transfer_id`; returns how long it took and how much
        came. Raises as `PullOrders.pull`."""


class KvTransferService(kv_transfer_pb2_grpc.KvTransferServicer):
    """gRPC service penstock.v1.KvTransfer: a transfer agent's description and status, and pulls ordered from outside
    the engine."""

    def __init__(self, agent: Callable[[], AgentPort], host: Callable[[], str]) -> None:
        """`agent` raises `ConfigurationError` where the engine has none. `host` is how other workers reach this
        machine now."""
        self._agent = agent
        self._host = host

    async def Describe(self, request: pb2.KvDescribeRequest, context: Context) -> pb2.KvDescribeResponse:
        """Where the agent listens and what its blocks look like."""
        try:
            about = await self._agent().describe()
        except PenstockError as error:
            await _abort(context, error)
        return pb2.KvDescribeResponse(
            agent_id=about.agent_id,
            host=self._host(),
            port=about.port,
            model=about.layout.model,
            dtype=about.layout.dtype,
            block_tokens=about.layout.block_tokens,
            region_block_bytes=about.layout.region_block_bytes,
            isa=about.layout.isa,
            parallel_transfers=about.settings.parallel_transfers,
            message_bytes=about.settings.message_bytes,
            checksums=about.settings.checksums,
            more_ports=about.more_ports,
        )

    async def Pull(self, request: pb2.KvPullRequest, context: Context) -> pb2.KvPullResponse:
        """Pull into reserved blocks; the end of the call cancels it."""
        deadline_s = request.deadline_ms / 1000 or context.time_remaining() or DEFAULT_DEADLINE_S
        try:
            stats = await self._agent().pull_reserved(
                PeerAddress(request.host, request.port, (), request.kv_token),
                request.transfer_id,
                list(request.source_block_ids),
                list(request.target_block_ids),
                deadline_s,
            )
        except PenstockError as error:
            await _abort(context, error)
        return pb2.KvPullResponse(
            kv_bytes=stats.nbytes,
            messages=stats.messages,
            waited_ms=stats.waited_s * 1e3,
            duration_ms=stats.duration_s * 1e3,
        )

    async def Status(self, request: pb2.KvStatusRequest, context: Context) -> pb2.KvStatusResponse:
        """Transfers that run and wait now, and totals since the start."""
        try:
            status = await self._agent().status()
        except PenstockError as error:
            await _abort(context, error)
        return pb2.KvStatusResponse(
            pulling=status.pulling,
            pull_queue=status.pull_queue,
            serving=status.serving,
            serve_queue=status.serve_queue,
            connections=status.connections,
            exports=status.exports,
            exported_blocks=status.exported_blocks,
            pulls_total=status.pulls_total,
            failed_pulls_total=status.failed_pulls_total,
            pulled_bytes_total=status.pulled_bytes_total,
            pull_seconds_total=status.pull_seconds_total,
            obstacle=status.obstacle,
            reopened_total=status.reopened_total,
            rejected_total=status.rejected_total,
            ranks=[pb2.KvRankStatus(**asdict(rank)) for rank in status.ranks],
        )


def serve_agent(server: RpcServer, agent: Callable[[], AgentPort], address: Callable[[], str]) -> None:
    """Add the service to a worker's server. `address` is where peers reach the agent now."""
    service = KvTransferService(agent, lambda: split_ports(split_cores(address())[0])[0])
    server.add(kv_transfer_pb2_grpc.add_KvTransferServicer_to_server, service, SERVICE_NAME)


async def _abort(context: Context, error: PenstockError) -> NoReturn:
    await context.abort(_CODES.get(type(error), grpc.StatusCode.INTERNAL), str(error))
    raise AssertionError("abort returned")
