"""The cluster simulator: a trace through the live control plane onto modelled instances."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from controlplane.model.cluster import ClusterLimits, ClusterTable
from controlplane.model.instance import InstanceDescription, InstanceState, LoadReport
from controlplane.model.placement import PlacementRequest
from controlplane.policies.interface import Policy
from controlplane.policies.place import place
from mesh.errors import NoInstance, RequestRefused
from simulator.cluster.config import ClusterConfig
from simulator.cluster.ledger import Ledger, OpenRequest
from simulator.cluster.prefix import prompt_block_hashes
from simulator.cluster.reporting import seen_report_times_ms
from simulator.cluster.worker import Worker
from simulator.cost.model import CostModel
from simulator.instance.counted_request import CountedRequest
from simulator.instance.instance import Instance
from simulator.report.outcome import RequestOutcome
from simulator.traces.request import TraceRequest

_SWEEP_PLACES = 1 << 16


@dataclass(frozen=True, slots=True)
class _Moment:
    """When the outside world touches the cluster."""

    at_ms: float
    act: Callable[[float], None]


class ClusterSimulation:
    """Runs once, from the first arrival to the last end. Equal arguments give equal outcomes.

    Time jumps from moment to moment: an arrival, a failure, a return. Between them instances do not touch each
    other, so each advances by itself.
    """

    def __init__(
        self, requests: Sequence[TraceRequest], config: ClusterConfig, cost: CostModel, policy: Policy
    ) -> None:
        self.config = config
        self.ledger = Ledger()
        blocks = config.instances * config.instance.kv_blocks
        self.table = ClusterTable(ClusterLimits(max_indexed_blocks=blocks, max_unreported_requests=len(requests) + 1))
        self.workers: dict[str, Worker] = {}
        self._policy = policy
        self._cost = cost
        self._requests = requests
        self._moments = self._plan_moments()
        self._looks_ms = self._plan_looks()
        for number in range(config.instances):
            self._join(number, incarnation=0)

    def run(self, on_progress: Callable[[int], None] | None = None) -> list[RequestOutcome]:
        """Outcomes in the order of the trace; `on_progress` hears how many requests have ended, now and then."""
        for count, moment in enumerate(self._moments):
            self._advance(moment.at_ms)
            moment.act(moment.at_ms)
            if on_progress is not None and count % 64 == 0:
                on_progress(self.ledger.ended)
        self._advance(inf)
        if on_progress is not None:
            on_progress(self.ledger.ended)
        return self.ledger.outcomes()

    # -- what happens

    def _advance(self, until_ms: float) -> None:
        """Let every instance live on, then tell the scheduler what has reached it by now."""
        arrived_by_ms = until_ms - self.config.report_delay_ms
        for worker in self.workers.values():
            if worker.due_ms <= until_ms:
                worker.advance(until_ms)
            while worker.sent and worker.sent[0].sent_ms <= arrived_by_ms:
                self._deliver(worker)
        for request_id in self.ledger.take_ended():
            self.table.ended(request_id)

    def _deliver(self, worker: Worker) -> None:
        report = worker.sent.popleft()
        instance_id, incarnation_id = worker.description.instance_id, worker.description.incarnation_id
        for change in report.kv_blocks:
            self.table.cached(instance_id, incarnation_id, change)
        self.table.reported(instance_id, incarnation_id, report.load, InstanceState.READY, report.admitted_request_ids)

    def _arrive(self, index: int, now_ms: float) -> None:
        trace = self._requests[index]
        hashes = prompt_block_hashes(trace, self.config.instance.block_tokens)
        request = CountedRequest(f"r{index}", trace.input_tokens, trace.output_tokens, block_hashes=hashes)
        self.ledger.arrived(OpenRequest(index, trace.arrival_s, request))
        self._place(request, now_ms)

    def _place(self, request: CountedRequest, now_ms: float, failed_on: frozenset[str] = frozenset()) -> None:
        asked = PlacementRequest(
            request_id=request.request_id,
            model=self.config.model,
            prompt_tokens=request.prompt_tokens + request.emitted_tokens,
            now_s=now_ms / 1000,
            block_hashes=request.block_hashes,
            max_tokens=request.output_tokens,
            priority=request.priority,
            excluded_instance_ids=failed_on,
        )
        try:
            instance_id = place(self.table, self._policy, asked).instance.instance_id
            self.ledger.open[request.request_id].instance_id = instance_id
            self.workers[instance_id].submit(request, now_ms)
        except (NoInstance, RequestRefused) as error:
            self.table.ended(request.request_id)
            self.ledger.failed(request.request_id, now_ms / 1000, str(error))

    def _fail(self, number: int, now_ms: float) -> None:
        worker = self.workers.pop(_instance_id(number))
        instance_id = worker.description.instance_id
        self.table.lost(instance_id, worker.description.incarnation_id)
        while self.table.index.sweep(_SWEEP_PLACES):
            continue
        for request_id, emitted_tokens in worker.unfinished().items():
            entry = self.ledger.open[request_id]
            entry.request = replace(entry.request, emitted_tokens=emitted_tokens)
            self._place(entry.request, now_ms, frozenset((instance_id,)))

    def _join(self, number: int, incarnation: int) -> None:
        """An empty instance that is ready, and known to be, at once."""
        description = self._description(number, incarnation)
        instance = Instance(self.config.instance, self._cost)
        self.workers[description.instance_id] = Worker(
            description, instance, self.ledger, self._looks_ms[number], self.config.skip_steps
        )
        self.table.joined(description)
        self.table.reported(description.instance_id, description.incarnation_id, LoadReport(), InstanceState.READY)

    # -- what is planned

    def _plan_moments(self) -> list[_Moment]:
        moments = [
            _Moment(request.arrival_s * 1000, lambda now_ms, index=index: self._arrive(index, now_ms))  # type: ignore[misc]
            for index, request in enumerate(self._requests)
        ]
        for incarnation, failure in enumerate(self.config.failures, start=1):
            number = failure.instance
            moments.append(_Moment(failure.at_s * 1000, lambda now_ms, number=number: self._fail(number, now_ms)))  # type: ignore[misc]
            if failure.back_after_s is not None:
                back_ms = (failure.at_s + failure.back_after_s) * 1000
                moments.append(
                    _Moment(back_ms, lambda _, number=number, incarnation=incarnation: self._join(number, incarnation))  # type: ignore[misc]
                )
        return sorted(moments, key=lambda moment: moment.at_ms)

    def _plan_looks(self) -> list[list[float]]:
        """For each instance when its reports leave; it is looked at when it fails, too."""
        moments_ms = np.array([moment.at_ms for moment in self._moments])
        config = self.config
        phases_ms = np.random.default_rng(config.seed).uniform(0, config.report_interval_ms, config.instances)
        looks_ms = [
            seen_report_times_ms(moments_ms, config.report_interval_ms, config.report_delay_ms, phase_ms)
            for phase_ms in phases_ms.tolist()
        ]
        for failure in config.failures:
            looks_ms[failure.instance] = sorted({*looks_ms[failure.instance], failure.at_s * 1000})
        return looks_ms

    def _description(self, number: int, incarnation: int) -> InstanceDescription:
        instance = self.config.instance
        return InstanceDescription(
            instance_id=_instance_id(number),
            incarnation_id=str(incarnation),
            address="",
            model=self.config.model,
            model_path="",
            engine="simulated",
            block_tokens=instance.block_tokens,
            kv_blocks=instance.kv_blocks,
            max_model_len_tokens=instance.max_model_len_tokens,
            max_batch_requests=instance.max_batch_requests,
            max_step_tokens=instance.max_step_tokens,
        )


def _instance_id(number: int) -> str:
    return f"instance-{number}"
