"""A simulation, recorded: attached to it as its controllers are, and changing nothing of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controlplane.model.instance import InstanceState
from controlplane.model.migration_order import MigrationOrder
from controlplane.policies.interface import Policy, has_pools
from controlplane.scheduler.explanations import NO_POOLS
from penstock.v1 import frontend_pb2, scheduler_pb2
from services.cli.console.recorder import ConsoleRecorder, InstanceNow, OpenRequest
from services.frontend.console.recorded import Moments, first_interval_ms
from services.frontend.console.window import Objectives
from simulator.cluster.control import Cluster, ClusterEvent, Ended, MigrationEnd, Placed
from simulator.report.outcome import RequestOutcome


@dataclass(slots=True)
class SimulationRecorder:
    """A `Controller` that orders nothing."""

    policy: Policy
    recorder: ConsoleRecorder
    _cluster: Cluster | None = None

    @classmethod
    def of(
        cls, name: str, policy: Policy, rescheduler: str, objectives: Objectives, arrivals_s: float = 0.0
    ) -> "SimulationRecorder":
        """`name`: what the policy is called in the page. `arrivals_s`: how long requests arrive, as far as is known."""
        shown = scheduler_pb2.GetPolicyResponse(policy=policy.name, parameters=policy.parameters.values())
        return cls(
            policy, ConsoleRecorder(name, shown, objectives, rescheduler, Moments(first_interval_ms(arrivals_s)))
        )

    @property
    def interval_ms(self) -> float:
        return self.recorder.moments.interval_ms

    def attached(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._look(cluster, 0.0)

    def act(self, cluster: Cluster, now_ms: float) -> Sequence[MigrationOrder]:
        self._look(cluster, now_ms)
        return ()

    def on_event(self, event: ClusterEvent, now_ms: float) -> None:
        match event:
            case Placed(placement=placement) if placement is not None:
                self.recorder.placed(placement, now_ms, self._pools(placement.request.model))
            case Ended(request_id=request_id, outcome=outcome) if outcome is not None:
                request = self.recorder.open.get(request_id)
                if request is None:  # nobody ever had it
                    model = "" if self._cluster is None else self._cluster.model
                    request = OpenRequest(request_id, model, now_ms, outcome.input_tokens, "", "")
                self.recorder.ends(request, _message(request, outcome))
            case MigrationEnd():
                self.recorder.moved(_order(event))
            case _:
                pass

    def _pools(self, model: str) -> Mapping[str, str]:
        return self.policy.pools(model) if has_pools(self.policy) else NO_POOLS

    def _look(self, cluster: Cluster, now_ms: float) -> None:
        if not self.recorder.moments.is_due(now_ms):
            return
        cached, pools = cluster.cached_blocks(), self._pools(cluster.model)
        instances = [
            InstanceNow(
                cluster.description(each),
                cluster.load(each),
                InstanceState.READY,
                cached.get(each, 0),
                pool=pools.get(each, ""),
            )
            for each in cluster.instance_ids()
        ]
        shown = {request.instance_id for request in self.recorder.oldest()}
        alive = shown.intersection(cluster.instance_ids())
        generated = {
            running.request_id: running.generated_tokens
            for instance_id in sorted(alive)
            for running in cluster.running(instance_id)
        }
        self.recorder.look(now_ms, instances, generated)


def _message(request: OpenRequest, outcome: RequestOutcome) -> frontend_pb2.EndedRequest:
    arrived_ms = 1000 * outcome.arrival_s
    message = frontend_pb2.EndedRequest(
        status=503 if outcome.error else 200,
        prompt_tokens=outcome.input_tokens,
        cached_tokens=outcome.cached_tokens,
        generated_tokens=outcome.output_tokens,
        arrived_unix_ms=int(arrived_ms),
        admitted_ms=0.0,
        ended_ms=outcome.e2e_ms,
    )
    if request.instance_id:
        message.placed_ms = max(0.0, request.placed_ms - arrived_ms)
    if outcome.ttft_ms is not None:
        message.first_token_ms = outcome.ttft_ms
    return message


def _order(end: MigrationEnd) -> scheduler_pb2.ReschedulerOrder:
    outcome = scheduler_pb2.ORDER_OUTCOME_MOVED if end.moved else scheduler_pb2.ORDER_OUTCOME_STAYED
    return scheduler_pb2.ReschedulerOrder(
        request_id=end.order.request_id,
        source_instance_id=end.order.source_instance_id,
        target_instance_id=end.order.target_instance_id,
        reason=end.order.reason,
        ordered_unix_ms=int(end.ordered_ms),
        outcome=outcome,
        message=end.reason,
        paused_ms=end.paused_ms,
        duration_ms=end.ended_ms - end.ordered_ms,
    )
