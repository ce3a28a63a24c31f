"""Asks everybody who may know it for the story of one request."""

import asyncio
from dataclasses import dataclass
from typing import Any

from mesh.errors import RpcError
from mesh.runtime import Clock
from penstock.v1 import frontend_pb2, frontend_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from services.frontend.console.collector import DEADLINE_S, Collector, Unanswered
from services.frontend.console.requests import Story, story
from services.frontend.console.update import Viewer
from services.frontend.console.view import move_row


@dataclass(frozen=True, slots=True)
class Stories:
    """Looks up requests by id, at all frontends and schedulers."""

    collector: Collector
    clock: Clock

    async def find(self, request_id: str, viewer: Viewer) -> Story | None:
        """None if nobody knows it, or it is somebody else's."""
        frontends = self.collector.members.members("frontend")
        schedulers = self.collector.members.members("scheduler")
        ended_request = frontend_pb2.ListEndedRequest(request_id=request_id, limit=1)
        running_request = frontend_pb2.ListFrontendRequestsRequest()
        explain_request = scheduler_pb2.ExplainRequest(request_id=request_id)
        frontend, scheduler = frontend_pb2_grpc.FrontendStub, scheduler_pb2_grpc.SchedulerStub
        lists, runs, explanations = await asyncio.gather(
            asyncio.gather(*(self._ask(each, frontend, "ListEnded", ended_request) for each in frontends)),
            asyncio.gather(*(self._ask(each, frontend, "ListRequests", running_request) for each in frontends)),
            asyncio.gather(*(self._ask(each, scheduler, "Explain", explain_request) for each in schedulers)),
        )
        missing = [each.why for each in (*lists, *runs) if isinstance(each, Unanswered)]
        names = [member.member_id for member in frontends]
        ended = {
            name: answer.requests[-1]
            for name, answer in zip(names, lists, strict=True)
            if not isinstance(answer, Unanswered) and answer.requests
        }
        running = {
            name: each
            for name, answer in zip(names, runs, strict=True)
            if not isinstance(answer, Unanswered)
            for each in answer.requests
            if each.request_id == request_id
        }
        known = [*ended.values(), *running.values()]
        if not viewer.sees_all and not any(each.owner == viewer.owner for each in known):
            return None
        explained = {
            member.member_id: answer
            for member, answer in zip(schedulers, explanations, strict=True)
            if not isinstance(answer, Unanswered)
        }
        orders = sorted(
            (order for answer in explained.values() for order in answer.moves), key=lambda order: order.ordered_unix_ms
        )
        moves = [move_row(order) for order in orders]
        return story(request_id, ended, running, explained, moves, missing, int(1000 * self.clock.unix_s()))

    async def _ask(self, member: Any, stub: Any, method: str, request: Any) -> Any:
        try:
            return await self.collector.ask(member, stub, method, request, DEADLINE_S)
        except RpcError as error:
            return Unanswered(str(error))
