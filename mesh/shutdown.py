"""Graceful shutdown of a process, and the RPC by which an operator has it restarted."""

import asyncio
import logging
import math

import grpc

from mesh.exit_status import ExitStatus
from penstock.v1 import member_pb2, member_pb2_grpc

log = logging.getLogger(__name__)


class Shutdown:
    """Asked for at most once; asked again by a signal, it cuts the drain."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.cut_asked = asyncio.Event()
        self.status = ExitStatus.STOPPED
        """Of the process, if it does not fail before."""
        self.drain_s: float | None = None
        """What running work is given; None: as the settings say."""

    def ask(self, status: ExitStatus, drain_s: float | None = None) -> bool:
        """Drain and end with `status`. False, and without effect, if an end has been asked for before."""
        if self.asked.is_set():
            return False
        self.status, self.drain_s = status, drain_s
        self.asked.set()
        return True

    def on_signal(self) -> None:
        """SIGTERM or SIGINT: the first drains, the second cuts."""
        if not self.ask(ExitStatus.STOPPED):
            self.cut_asked.set()


class MemberService(member_pb2_grpc.MemberServicer):
    """penstock.v1.Member, which `run_role` serves for every role."""

    def __init__(
        self, role: str, member_id: str, incarnation_id: str, drain_s: float, shutdown: Shutdown, supervised: bool
    ) -> None:
        """`drain_s` is what running work is given where the caller does not say; `supervised`: whether `penstock up`
        starts the process again."""
        self._role = role
        self._member_id = member_id
        self._incarnation_id = incarnation_id
        self._drain_s = drain_s
        self._shutdown = shutdown
        self._supervised = supervised

    async def Restart(
        self, request: member_pb2.RestartRequest, context: grpc.aio.ServicerContext
    ) -> member_pb2.RestartResponse:
        """Drain, then end to be started again."""
        drain_s = request.drain_s if request.HasField("drain_s") else self._drain_s
        if not (math.isfinite(drain_s) and drain_s >= 0):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"drain_s is {drain_s}; give seconds, 0 or more")
        if request.incarnation_id != self._incarnation_id:
            message = (
                f"this is incarnation {self._incarnation_id} of {self._member_id}, not {request.incarnation_id!r}: it "
                "has been restarted meanwhile; look again"
            )
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
        if not self._shutdown.ask(ExitStatus.RESTART, drain_s):
            message = f"{self._member_id} is ending already; wait until it has left the mesh"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
        log.info("restarting, as an operator asked", extra={"drain_s": drain_s})
        return member_pb2.RestartResponse(
            role=self._role, member_id=self._member_id, drain_s=drain_s, supervised=self._supervised
        )
