"""The frontend's gRPC service, for operators."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from mesh.errors import PeerUnavailable
from penstock.v1 import frontend_pb2, frontend_pb2_grpc
from services.frontend.errors import ApiError
from services.frontend.placement.scheduler_link import SchedulerLink
from services.frontend.requests.service import FrontendService, RunningRequest
from services.frontend.workers.link import WorkerLink


class FrontendServicer(frontend_pb2_grpc.FrontendServicer):
    """Implements `penstock.v1.Frontend`, which `penstock status` asks."""

    def __init__(self, service: FrontendService, http_address: Callable[[], str]) -> None:
        self._service = service
        self._http_address = http_address

    async def GetStatus(
        self, request: frontend_pb2.GetFrontendStatusRequest, context: object
    ) -> frontend_pb2.GetFrontendStatusResponse:
        """Requests by state, connections to workers and schedulers, and the fallback in force, if any."""
        service = self._service
        return frontend_pb2.GetFrontendStatusResponse(
            http_address=self._http_address(),
            active_requests=service.gate.queue.running,
            queued_requests=service.gate.queue.queued,
            requests_total=service.requests_total,
            workers=[_connection(link) for link in service.pool.links()],
            models=[model.name for model in service.catalogue.served()],
            placement_fallback=service.placement.fallback,
            schedulers=[scheduler_connection(link) for link in service.placement.links()],
            waiting_requests=len(service.room),
            parser_process=service.parser_process.state,
            demand=[
                frontend_pb2.ModelDemand(model=model, arrivals_total=arrivals, waiting=waiting)
                for model, arrivals, waiting in service.room.demand()
            ],
        )

    async def KeepResponse(
        self, request: frontend_pb2.KeepResponseRequest, context: Any
    ) -> frontend_pb2.KeepResponseResponse:
        """Keep another frontend's copy."""
        try:
            self._service.background.keep_copy(request.response)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no response: {error}")
        return frontend_pb2.KeepResponseResponse()

    async def FindResponse(
        self, request: frontend_pb2.FindResponseRequest, context: object
    ) -> frontend_pb2.FindResponseResponse:
        """What is kept here, or made."""
        found = self._service.responses.store.find(request.response_id, request.owner)
        if found is None and request.with_running:
            running = self._service.background.running(request.response_id, request.owner)
            found = None if running is None else running.state()
        message = None if found is None else found.to_message(request.response_id)
        return frontend_pb2.FindResponseResponse(response=message)

    async def DropResponse(
        self, request: frontend_pb2.DropResponseRequest, context: object
    ) -> frontend_pb2.DropResponseResponse:
        """Forget it."""
        was_there = self._service.background.drop_here(request.response_id, request.owner)
        return frontend_pb2.DropResponseResponse(was_there=was_there)

    async def EntrustResponse(
        self, request: frontend_pb2.EntrustResponseRequest, context: Any
    ) -> frontend_pb2.EntrustResponseResponse:
        """Go on with another frontend's response if that is lost."""
        try:
            if not self._service.background.take(request):
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too much is entrusted to this frontend")
        except PeerUnavailable as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no response: {error}")
        return frontend_pb2.EntrustResponseResponse()

    async def FollowResponse(
        self, request: frontend_pb2.FollowResponseRequest, context: Any
    ) -> AsyncIterator[frontend_pb2.FollowResponseResponse]:
        """Events of a response that is made here, or was."""
        after = request.after if request.HasField("after") else None
        try:
            events = self._service.background.events_here(request.response_id, request.owner, after)
        except ApiError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
            return
        if events is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"{request.response_id} is not here")
            return
        yield frontend_pb2.FollowResponseResponse()  # it is here: whoever asks need not wait for the first event
        async for some in events:
            yield frontend_pb2.FollowResponseResponse(events=some)

    async def CancelResponse(
        self, request: frontend_pb2.CancelResponseRequest, context: object
    ) -> frontend_pb2.CancelResponseResponse:
        """End a response that is made here."""
        ended = await self._service.background.cancel_here(request.response_id, request.owner)
        message = None if ended is None else ended.to_message(request.response_id)
        return frontend_pb2.CancelResponseResponse(response=message)

    async def ShareUse(self, request: frontend_pb2.ShareUseRequest, context: Any) -> frontend_pb2.ShareUseResponse:
        """What another frontend has let in."""
        try:
            self._service.shared_limits.heard(request, self._service.clock())
        except PeerUnavailable as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return frontend_pb2.ShareUseResponse()

    async def ListEnded(
        self, request: frontend_pb2.ListEndedRequest, context: object
    ) -> frontend_pb2.ListEndedResponse:
        """The last requests that ended, or one of them."""
        ended = self._service.ended
        found = ended.since(request.after, request.limit, request.request_id)
        return frontend_pb2.ListEndedResponse(requests=found, last=ended.last)

    async def ListRequests(
        self, request: frontend_pb2.ListFrontendRequestsRequest, context: object
    ) -> frontend_pb2.ListFrontendRequestsResponse:
        """Requests in flight and where each one runs."""
        now_s = self._service.clock()
        running = list(self._service.running.values())
        listed = [entry for request in running for entry in _requests(request, now_s)]
        return frontend_pb2.ListFrontendRequestsResponse(requests=listed)


def _connection(link: WorkerLink) -> frontend_pb2.WorkerConnection:
    return frontend_pb2.WorkerConnection(
        instance_id=link.instance_id,
        incarnation_id=link.member.incarnation_id,
        address=link.member.address,
        connected=link.is_connected,
        requests=link.requests,
        transport=link.transport_name,
    )


def scheduler_connection(link: SchedulerLink) -> frontend_pb2.SchedulerConnection:
    """A scheduler as its users tell of it."""
    return frontend_pb2.SchedulerConnection(
        member_id=link.member.member_id,
        incarnation_id=link.member.incarnation_id,
        address=link.member.address,
        connected=link.is_open,
        breaker=link.breaker.state.value,
        outstanding=link.outstanding,
        transport=link.transport_name,
    )


def _requests(request: RunningRequest, now_s: float) -> list[frontend_pb2.FrontendRequest]:
    """One entry for each choice: a choice is a request to an engine."""
    age_ms = int(1000 * (now_s - request.started_s))
    return [
        frontend_pb2.FrontendRequest(
            request_id=relay.request_id,
            model=relay.model,
            instance_id=relay.instance_id,
            prompt_tokens=len(relay.prompt_token_ids),
            generated_tokens=len(relay.emitted_token_ids),
            age_ms=age_ms,
            owner=request.tenant.name,
        )
        for relay in request.relays
    ]
