"""The instances of a simulation, and the scheduler's view of them."""

from bisect import insort
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from controlplane.model.cluster import ClusterTable
from controlplane.model.cluster_limits import ClusterLimits
from controlplane.model.incarnation import Incarnation
from controlplane.model.instance import InstanceDescription, InstanceState, KvBlocks, LoadReport
from controlplane.model.kv_costs import KvCosts
from controlplane.model.prefix_index import PrefixIndex
from simulator.cluster.block_dict import BlockDict
from simulator.cluster.config import ClusterConfig, InstanceSpec
from simulator.cluster.events import EventQueue
from simulator.cluster.host_memory import HostMemory
from simulator.cluster.report_times import Grid, JustInTime, ReportTimes
from simulator.cluster.worker import Worker, WorkerHooks
from simulator.cost.model import BatchShape, CostModel, PrefillChunk
from simulator.instance.fetcher import Fetcher
from simulator.instance.instance import SimulatedInstance

_SWEEP_PLACES = 1 << 16


class SimulatedFleet:
    """Workers come and go; `see` lets the schedulers' tables know what reports have told them by now."""

    def __init__(
        self,
        config: ClusterConfig,
        cost: CostModel,
        events: EventQueue,
        hooks: WorkerHooks,
        max_requests: int,
        looks_ms: list[float],
        *,
        reports_progress: bool = True,
    ) -> None:
        """`looks_ms`: when the table will be looked at, as far as that is known; ascending. `reports_progress`: see
        `Worker`."""
        blocks = sum(config.spec(number).config.kv_blocks for number in range(config.instances))
        self.memories = _host_memories(config)
        """Of the hosts; empty where they keep no KV."""
        # What hosts hold is in the same index.
        blocks += sum(memory.max_blocks for memory in self.memories)
        limits = ClusterLimits(max_indexed_blocks=blocks, max_unreported_requests=max_requests + 1)
        self.tables = tuple(
            ClusterTable(limits, PrefixIndex(blocks, BlockDict(blocks))) for _ in range(config.schedulers.count)
        )
        """Of the schedulers, each."""
        self.table = self.tables[0]
        self.workers: dict[str, Worker] = {}
        self.fetcher_of: Callable[[str], Fetcher | None] = lambda _: None
        """Who brings KV to an instance, by its id."""
        self._config = config
        self._cost = cost
        self._events = events
        self._reports_progress = reports_progress
        self._hooks = hooks if not self.memories else replace(hooks, cached=self._copy_to_host)
        self._looks_ms = looks_ms if config.report_interval_ms == 0 else []
        phases_ms = np.random.default_rng(config.seed).uniform(0, config.report_interval_ms, config.instances)
        self._times = [self._report_times(phase_ms) for phase_ms in phases_ms.tolist()]

    def spec(self, instance_id: str) -> InstanceSpec:
        """How an instance, alive or not, is modelled."""
        return self._config.spec(_number_of(instance_id))

    def join(self, number: int, incarnation: int) -> Worker:
        """An empty instance that is ready, and known to be, at once."""
        spec = self._config.spec(number)
        description = self._description(number, incarnation)
        worker = Worker(
            description,
            SimulatedInstance(
                spec.config,
                spec.cost or self._cost,
                self.fetcher_of(description.instance_id),
                times_tokens=self._reports_progress,
            ),
            self._events,
            self._times[number],
            self._config.report_delay_ms,
            self._hooks,
            number,
            skip_steps=self._config.skip_steps,
            reports_progress=self._reports_progress,
        )
        self.workers[description.instance_id] = worker
        profiled = spec.profiled or self._config.profiled
        memory = self.host_memory(description.instance_id)
        for table in self.tables:
            table.joined(description)
            if profiled is not None:
                table.costed(description.instance_id, description.incarnation_id, profiled)
            table.kv_costed(description.instance_id, description.incarnation_id, self._kv_costs(number))
            table.reported(description.instance_id, description.incarnation_id, LoadReport(), InstanceState.READY)
            if memory is not None and len(memory):
                table.cached(description.instance_id, description.incarnation_id, memory.content())
        return worker

    def host_memory(self, instance_id: str) -> HostMemory | None:
        """Of the instance's host; None where hosts keep no KV."""
        if not self.memories:
            return None
        return self.memories[_number_of(instance_id) // self._config.kv_reuse.host_instances]

    def prefill_ms(self, instance_id: str, tokens: int) -> float:
        """About what it takes the instance to compute so many tokens of a prompt."""
        cost = self.spec(instance_id).cost or self._cost
        return cost.step_ms(BatchShape((PrefillChunk(tokens, 0),)))

    def lose(self, number: int, now_ms: float) -> Worker:
        """An instance dies; its worker shows what it had become."""
        worker = self.workers.pop(instance_id_of(number))
        worker.stop(now_ms)
        for table in self.tables:
            table.lost(worker.description.instance_id, worker.description.incarnation_id)
            while table.index.sweep(_SWEEP_PLACES):
                continue
        return worker

    def see(self, now_ms: float) -> None:
        """Tell the tables what has reached them by now."""
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
            for table in self.tables:
                for change in report.kv_blocks:
                    table.cached(instance_id, incarnation_id, change)
                table.reported(
                    instance_id,
                    incarnation_id,
                    report.load,
                    InstanceState.READY,
                    report.admitted_request_ids,
                    report.ended_request_ids,
                )

    def _copy_to_host(self, worker: Worker, changes: KvBlocks) -> None:
        memory = self.host_memory(worker.description.instance_id)
        if memory is None:
            return
        on_host = memory.store(changes.stored)
        if on_host.stored or on_host.removed:
            for each in self.workers.values():
                if self.host_memory(each.description.instance_id) is memory:
                    each.host_changed(on_host, self._events.now_ms)

    def _kv_costs(self, number: int) -> KvCosts:
        """Exact, but for transfers that share a link: the live mesh measures them."""
        spec, reuse = self._config.spec(number), self._config.kv_reuse
        link, token_bytes = spec.link or self._config.link, spec.config.block_bytes / spec.config.block_tokens
        return KvCosts(
            link.latency_ms + 2 * self._config.migration.message_delay_ms,
            token_bytes / link.bytes_per_ms if reuse.pulls else None,
            reuse.load_latency_ms,
            reuse.load_token_ms(spec.config) if reuse.host_factor else None,
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
            kv_token_bytes=spec.config.block_bytes // spec.config.block_tokens,
        )


def _host_memories(config: ClusterConfig) -> tuple[HostMemory, ...]:
    reuse = config.kv_reuse
    if not reuse.host_factor:
        return ()
    return tuple(
        HostMemory(
            int(
                reuse.host_factor
                * sum(
                    config.spec(number).config.kv_blocks
                    for number in range(first, min(first + reuse.host_instances, config.instances))
                )
            )
        )
        for first in range(0, config.instances, reuse.host_instances)
    )


def _number_of(instance_id: str) -> int:
    return int(instance_id.rpartition("-")[2])


def instance_id_of(number: int) -> str:
    """The id of an instance by its number, counted from 0."""
    return f"instance-{number}"


def incarnation_of(worker: Worker) -> Incarnation:
    """The life of an instance that a worker is."""
    return Incarnation(worker.description.instance_id, worker.description.incarnation_id)
