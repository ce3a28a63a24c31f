"""The frontend's gRPC service, for operators."""

from collections.abc import Callable

from penstock.v1 import frontend_pb2, frontend_pb2_grpc
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
            schedulers=[_scheduler(link) for link in service.placement.links()],
            waiting_requests=len(service.room),
        )

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
    )


def _scheduler(link: SchedulerLink) -> frontend_pb2.SchedulerConnection:
    return frontend_pb2.SchedulerConnection(
        member_id=link.member.member_id,
        incarnation_id=link.member.incarnation_id,
        address=link.member.address,
        connected=link.is_open,
        breaker=link.breaker.state.value,
        outstanding=link.outstanding,
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
        )
        for relay in request.relays
    ]
