"""The cluster simulator: a trace through the live control plane onto modelled instances."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from controlplane.model.cluster import ClusterTable
from controlplane.model.instance import InstancePhase
from controlplane.model.placement import Placement, PlacementRequest
from controlplane.model.shared_event import SharedEvent, SharedKind
from controlplane.policies.interface import Observer, Policy, ignores_progress, is_observer
from controlplane.policies.place import place_decode
from controlplane.protocols.recovery import RecoveryManager
from simulator.cluster.arrivals import Arrivals
from simulator.cluster.config import ClusterConfig
from simulator.cluster.control import (
    ClusterEvent,
    Controller,
    Ended,
    FirstToken,
    Joined,
    Lost,
    Placed,
    Preempted,
)
from simulator.cluster.events import EventQueue, Rank
from simulator.cluster.fleet import SimulatedFleet, incarnation_of, instance_id_of
from simulator.cluster.host_loads import HostLoads
from simulator.cluster.kv_links import KvLinks
from simulator.cluster.ledger import Ledger, OpenRequest
from simulator.cluster.migration.migrations import Migrations
from simulator.cluster.placements import Placements
from simulator.cluster.prefix import prompt_block_hashes
from simulator.cluster.prefix_pull.pulls import PrefixPulls
from simulator.cluster.recording import Recording, RecordingConfig
from simulator.cluster.schedulers import Schedulers
from simulator.cluster.view import ClusterView
from simulator.cluster.worker import Worker, WorkerHooks
from simulator.cost.model import CostModel
from simulator.instance.counted_request import CountedRequest
from simulator.instance.step import StepResult
from simulator.report.outcome import RequestOutcome
from simulator.traces.request import TraceRequest

_PROGRESS_EVERY = 64
_Tick: TypeAlias = Callable[[float], None]


class ClusterSimulation:
    """Runs once, from the first arrival to the last end. Equal arguments give equal outcomes.

    Time jumps from event to event. Instances take their steps in runs, which end early where somebody touches them.
    """

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        config: ClusterConfig,
        cost: CostModel,
        policy: Policy,
        controllers: Sequence[Controller] = (),
        recording: RecordingConfig | None = None,
    ) -> None:
        self.config = config
        self.events = EventQueue()
        self.ledger = Ledger()
        self.arrivals = Arrivals(requests, self.events, self._arrive)
        self.recording: Recording | None = None
        ids = tuple(instance_id_of(number) for number in range(config.instances))
        if recording is not None:
            self.recording = Recording(ids, recording)
        hooks = WorkerHooks(self._stepped, timed=self._timed if recording is not None else None)
        looks_ms = sorted([*self.arrivals.known_times_ms, *(failure.at_s * 1000 for failure in config.failures)])
        self.fleet = SimulatedFleet(
            config,
            cost,
            self.events,
            hooks,
            len(requests),
            looks_ms,
            reports_progress=_reads_progress(config, policy, controllers),
        )
        self.table, self.workers = self.fleet.table, self.fleet.workers
        self.schedulers = Schedulers(config, policy, self.fleet.tables, self.events)
        self.links = KvLinks(self.events)
        self.migrations = Migrations(
            config.migration, self.events, self.links, self.ledger, self._recover, self._choose_decode, self._tell
        )
        self.loads = HostLoads(config, self.events, self.fleet)
        self.pulls = PrefixPulls(config, self.events, self.links, self.fleet, self.loads)
        self.fleet.fetcher_of = self.loads.fetcher_of
        self.placements = Placements(
            config.model,
            self.schedulers,
            self.events,
            self.ledger,
            self.fleet,
            self.pulls,
            self._placed,
            self._end_badly,
            config.schedulers.bounce_tokens,
        )
        self.preemptions = 0
        self._requests = requests
        self._controllers = tuple(controllers)
        self._on_progress: Callable[[int], None] | None = None
        for number in range(config.instances):
            self._join(number, incarnation=0)
        self._schedule()

    def run(self, on_progress: Callable[[int], None] | None = None) -> list[RequestOutcome]:
        """Outcomes in the order of the trace; `on_progress` hears how many requests have ended, now and then."""
        self._on_progress = on_progress
        self.events.run()
        if on_progress is not None:
            on_progress(self.ledger.ended)
        return self.ledger.outcomes()

    # -- requests

    def _arrive(self, index: int, now_ms: float) -> None:
        trace = self._requests[index]
        hashes = prompt_block_hashes(trace, self.config.instance.block_tokens)
        request = CountedRequest(f"r{index}", trace.input_tokens, trace.output_tokens, block_hashes=hashes)
        arrival_s = now_ms / 1000 if trace.think_s is not None else trace.arrival_s
        entry = OpenRequest(index, arrival_s, request, RecoveryManager(request.request_id, self.config.recovery))
        self.ledger.arrived(entry)
        self.placements.arrived(entry, now_ms)
        if self._on_progress is not None and index % _PROGRESS_EVERY == 0:
            self._on_progress(self.ledger.ended)

    def _placed(self, entry: OpenRequest, placement: Placement) -> None:
        request, prefill_id = entry.request, placement.instance.instance_id
        decode_id = "" if placement.is_decode_open else placement.decode_instance.instance_id
        if decode_id != prefill_id:
            self.migrations.transfer(request.request_id, prefill_id, decode_id)
        if self._controllers:
            decoded_by = decode_id or prefill_id
            self._tell(Placed(request.request_id, prefill_id, decoded_by, request.prompt_tokens, placement))

    def _recover(self, request_id: str, emitted_tokens: int, now_ms: float) -> None:
        """Its owner has given it up: it goes on after its last token, wherever there is room."""
        entry = self.ledger.open[request_id]
        self.placements.lost(entry, entry.instance_id, emitted_tokens, now_ms)

    def _choose_decode(self, request_id: str, prefill_id: str, now_ms: float) -> str:
        """Who decodes a request whose prompt an instance has computed (Arrow, section 5.2); empty: that instance."""
        self.fleet.see(now_ms)
        request = self.ledger.open[request_id].request
        asked = PlacementRequest(
            request_id=request_id,
            model=self.config.model,
            prompt_tokens=request.prompt_tokens,
            now_s=now_ms / 1000,
            max_tokens=request.output_tokens,
            priority=request.priority,
        )
        scheduler = self.schedulers.of(request_id)
        chosen = place_decode(scheduler.table, scheduler.policy, asked, prefill_id)
        if chosen is None:
            return ""
        self.schedulers.share(SharedEvent(SharedKind.ARRIVING, request_id, chosen.instance_id, request.prompt_tokens))
        return chosen.instance_id

    def _end_badly(self, entry: OpenRequest, error: str, now_ms: float) -> None:
        request_id = entry.request.request_id
        self.schedulers.ended(request_id)
        self.ledger.failed(request_id, now_ms / 1000, error)
        self._ended(entry, error, now_ms)

    def _ended(self, entry: OpenRequest, error: str, now_ms: float) -> None:
        self.arrivals.ended(entry.index, now_ms, self.fleet.will_look)
        if self._controllers:
            outcome = self.ledger.outcome(entry.index)
            self._tell(Ended(entry.request.request_id, entry.instance_id, error, outcome))

    # -- instances

    def _stepped(self, worker: Worker, result: StepResult, now_ms: float) -> None:
        now_s, instance_id = now_ms / 1000, worker.description.instance_id
        for started in result.started:
            is_first = self.ledger.started(started.request_id, started.cached_prompt_tokens, now_s)
            if is_first and self._controllers:
                self._tell(FirstToken(started.request_id, instance_id))
        for request_id in result.finished:
            entry = self.ledger.open[request_id]
            self.ledger.finished(request_id, incarnation_of(worker), now_s)
            self.placements.ended(entry, now_ms)
            self.schedulers.ended(request_id)
            self._ended(entry, "", now_ms)
        for request_id in result.preempted:
            self.preemptions += 1
            if self.recording is not None:
                self.recording.preemptions[instance_id] += 1
            self._tell(Preempted(request_id, instance_id))
        self.migrations.after_step(worker, result)
        self.pulls.after_step(worker)

    def _timed(self, worker: Worker, durations_ms: NDArray[np.float64], decode_requests: int) -> None:
        assert self.recording is not None
        self.recording.stepped(worker.description.instance_id, durations_ms, decode_requests)

    def _join(self, number: int, incarnation: int) -> None:
        worker = self.fleet.join(number, incarnation)
        self.links.join(worker.description.instance_id, self.config.spec(number).link or self.config.link)
        self.migrations.joined(worker)
        self.pulls.joined(worker)
        self._tell(Joined(worker.description.instance_id))
        self.placements.joined(self.events.now_ms)

    def _fail(self, number: int, now_ms: float) -> None:
        self.fleet.see(now_ms)
        worker = self.fleet.lose(number, now_ms)
        lost = incarnation_of(worker)
        owned = {
            request_id: worker.instance.generated_tokens(request_id)
            for request_id in worker.instance.request_ids
            if (entry := self.ledger.open.get(request_id)) is not None and entry.owner == lost
        }
        for request_id in self.pulls.lost(lost.instance_id):
            owned[request_id] = self.ledger.open[request_id].request.emitted_tokens
        self.loads.lost(lost.instance_id)
        self._tell(Lost(lost.instance_id))
        self.migrations.lost(lost.instance_id)
        self.links.leave(lost.instance_id, now_ms)
        for request_id, emitted_tokens in owned.items():
            self.placements.lost(self.ledger.open[request_id], lost.instance_id, emitted_tokens, now_ms)

    # -- who watches

    def _tell(self, event: ClusterEvent) -> None:
        for controller in self._controllers:
            controller.on_event(event, self.events.now_ms)

    def _schedule(self) -> None:
        events = self.events
        self.arrivals.start()
        for incarnation, failure in enumerate(self.config.failures, start=1):
            number = failure.instance
            events.at(failure.at_s * 1000, Rank.FAILURE, lambda now_ms, number=number: self._fail(number, now_ms))  # type: ignore[misc]
            if failure.back_after_s is not None:
                events.at(
                    (failure.at_s + failure.back_after_s) * 1000,
                    Rank.FAILURE,
                    lambda _, number=number, incarnation=incarnation: self._join(number, incarnation),  # type: ignore[misc]
                )
        for policy, table in zip(self.schedulers.policies, self.fleet.tables, strict=True):
            if is_observer(policy):
                self._observe_every(policy, table)
        if self.recording is not None:
            self._record(self.recording)
        view = ClusterView(self.config, self.events, self.fleet, self.ledger, self.migrations)
        for controller in self._controllers:
            controller.attached(view)
            if controller.interval_ms is not None:
                self._act_every(controller, controller.interval_ms, view)

    def _observe_every(self, policy: Observer, table: ClusterTable) -> None:
        def observe(now_ms: float) -> None:
            self.fleet.see(now_ms)
            snapshot = table.snapshot(self.config.model)
            if snapshot is not None:
                policy.observe(snapshot, now_ms / 1000)

        self._every(policy.interval_s * 1000, observe)

    def _act_every(self, controller: Controller, interval_ms: float, view: "ClusterView") -> None:
        def act(now_ms: float) -> None:
            for order in controller.act(view, now_ms):
                self.migrations.order(order)

        self._every(interval_ms, act)

    def _every(self, interval_ms: float, act: _Tick) -> None:
        def tick(now_ms: float) -> None:
            act(now_ms)
            wind(now_ms)

        def wind(now_ms: float) -> None:
            self.fleet.will_look(now_ms + interval_ms)
            self.events.at(now_ms + interval_ms, Rank.WATCH, tick, background=True)

        wind(self.events.now_ms)

    def _record(self, recording: Recording) -> None:
        def sample(now_ms: float) -> None:
            count = len(recording.instance_ids)
            running, queued, tokens, fills = [0] * count, [0] * count, [0] * count, [0.0] * count
            for row, instance_id in enumerate(recording.instance_ids):
                worker = self.workers.get(instance_id)
                if worker is not None:
                    worker.glance(now_ms)
                    occupancy = worker.instance.occupancy()
                    running[row], queued[row], tokens[row], used = occupancy
                    fills[row] = used / worker.description.kv_blocks
            recording.sampled(now_ms / 1000, np.array([running, queued, tokens], np.int64), np.array(fills))
            self.events.at(now_ms + recording.interval_ms, Rank.WATCH, sample, background=True)

        self.events.at(0.0, Rank.WATCH, sample, background=True)


def _reads_progress(config: ClusterConfig, policy: Policy, controllers: Sequence[Controller]) -> bool:
    """Whether anybody may ask the table how far the requests that decode have come: controllers, who decides where to
    decode, and who weighs bringing KV, do."""
    phases = {config.spec(number).phase for number in range(config.instances)}
    brings_kv = config.kv_reuse.pulls or config.kv_reuse.host_factor > 0
    return bool(controllers) or phases != {InstancePhase.ANY} or brings_kv or not ignores_progress(policy)
