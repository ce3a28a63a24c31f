"""The instances of a simulation, and the scheduler's view of them."""

from bisect import insort

import numpy as np

from controlplane.model.cluster import ClusterLimits, ClusterTable
from controlplane.model.incarnation import Incarnation
from controlplane.model.instance import InstanceDescription, InstanceState, LoadReport
from simulator.cluster.config import ClusterConfig, InstanceSpec
from simulator.cluster.events import EventQueue
from simulator.cluster.report_times import Grid, JustInTime, ReportTimes
from simulator.cluster.worker import Worker, WorkerHooks
from simulator.cost.model import CostModel
from simulator.instance.instance import SimulatedInstance

_SWEEP_PLACES = 1 << 16


class SimulatedFleet:
    """Workers come and go; `see` lets the cluster table know what reports have told it by now."""

    def __init__(
        self,
        config: ClusterConfig,
        cost: CostModel,
        events: EventQueue,
        hooks: WorkerHooks,
        max_requests: int,
        looks_ms: list[float],
    ) -> None:
        """`looks_ms`: when the table will be looked at, as far as that is known; ascending."""
        blocks = sum(config.spec(number).config.kv_blocks for number in range(config.instances))
        self.table = ClusterTable(ClusterLimits(max_indexed_blocks=blocks, max_unreported_requests=max_requests + 1))
        self.workers: dict[str, Worker] = {}
        self._config = config
        self._cost = cost
        self._events = events
        self._hooks = hooks
        self._looks_ms = looks_ms if config.report_interval_ms == 0 else []
        phases_ms = np.random.default_rng(config.seed).uniform(0, config.report_interval_ms, config.instances)
        self._times = [self._report_times(phase_ms) for phase_ms in phases_ms.tolist()]

    def spec(self, instance_id: str) -> InstanceSpec:
        """How an instance, alive or not, is modelled."""
        return self._config.spec(int(instance_id.rpartition("-")[2]))

    def join(self, number: int, incarnation: int) -> Worker:
        """An empty instance that is ready, and known to be, at once."""
        spec = self._config.spec(number)
        description = self._description(number, incarnation)
        worker = Worker(
            description,
            SimulatedInstance(spec.config, spec.cost or self._cost),
            self._events,
            self._times[number],
            self._config.report_delay_ms,
            self._hooks,
            number,
            skip_steps=self._config.skip_steps,
        )
        self.workers[description.instance_id] = worker
        self.table.joined(description)
        self.table.reported(description.instance_id, description.incarnation_id, LoadReport(), InstanceState.READY)
        return worker

    def lose(self, number: int, now_ms: float) -> Worker:
        """An instance dies; its worker shows what it had become."""
        worker = self.workers.pop(instance_id_of(number))
        worker.stop(now_ms)
        self.table.lost(worker.description.instance_id, worker.description.incarnation_id)
        while self.table.index.sweep(_SWEEP_PLACES):
            continue
        return worker

    def see(self, now_ms: float) -> None:
        """Tell the table what has reached it by now."""
        for worker in self.workers.values():
            if worker.report_due_ms <= now_ms:
                self._deliver(worker, now_ms)

    def will_look(self, at_ms: float) -> None:
        """The table will be looked at then; for reports just in time."""
        if self._config.report_interval_ms == 0:
            insort(self._looks_ms, at_ms)

    def _deliver(self, worker: Worker, now_ms: float) -> None:
        instance_id, incarnation_id = worker.description.instance_id, worker.description.incarnation_id
        for report in worker.arrived_reports(now_ms):
            for change in report.kv_blocks:
                self.table.cached(instance_id, incarnation_id, change)
            self.table.reported(
                instance_id, incarnation_id, report.load, InstanceState.READY, report.admitted_request_ids
            )

    def _report_times(self, phase_ms: float) -> ReportTimes:
        config = self._config
        if config.report_interval_ms == 0:
            return JustInTime(config.report_delay_ms, self._looks_ms)
        return Grid(config.report_interval_ms, config.report_delay_ms, phase_ms)

    def _description(self, number: int, incarnation: int) -> InstanceDescription:
        spec = self._config.spec(number)
        return InstanceDescription(
            instance_id=instance_id_of(number),
            incarnation_id=str(incarnation),
            address="",
            model=self._config.model,
            model_path="",
            engine="simulated",
            block_tokens=spec.config.block_tokens,
            kv_blocks=spec.config.kv_blocks,
            max_model_len_tokens=spec.config.max_model_len_tokens,
            max_batch_requests=spec.config.max_batch_requests,
            max_step_tokens=spec.config.max_step_tokens,
            phase=spec.phase,
        )


def instance_id_of(number: int) -> str:
    """The id of an instance by its number, counted from 0."""
    return f"instance-{number}"


def incarnation_of(worker: Worker) -> Incarnation:
    """The life of an instance that a worker is."""
    return Incarnation(worker.description.instance_id, worker.description.incarnation_id)
