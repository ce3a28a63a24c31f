"""One instance in simulated time: its steps, and the reports it sends."""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.model.instance import InstanceDescription, KvBlocks, LoadReport
from controlplane.model.queue_belief import PresentLoad
from controlplane.protocols.bouncing import QueuedPrefills
from simulator.cluster.events import Event, EventQueue, Rank
from simulator.cluster.report_times import EARLY_MS, ReportTimes
from simulator.instance.counted_request import CountedRequest
from simulator.instance.instance import SimulatedInstance
from simulator.instance.step import Step, StepResult

_FIRST_RUN_STEPS = 16
_LONGEST_RUN_STEPS = 1024


class SentReport(msgspec.Struct, frozen=True):
    """What one report tells the scheduler."""

    sent_ms: float
    load: LoadReport
    admitted_request_ids: tuple[str, ...]
    ended_request_ids: tuple[str, ...]
    kv_blocks: tuple[KvBlocks, ...]
    """Changes of the prefix cache and of what the host holds since the report before, in order."""


@dataclass(frozen=True, slots=True, eq=False)
class WorkerHooks:
    """Who hears of what happens on an instance."""

    stepped: Callable[["Worker", StepResult, float], None]
    """A step, or the last of a run, is over; called before the next is planned."""
    cached: Callable[["Worker", KvBlocks], None] | None = None
    """Its prefix cache has changed."""
    timed: Callable[["Worker", NDArray[np.float64], int], None] | None = None
    """Steps of so many decoding requests are over, with their durations in ms."""


class Worker:
    """Runs an instance through the event queue, by runs of steps as long as nobody touches it.

    Whoever looks at the instance calls `look` before, whoever changes it `touch` before and `wake` after.
    """

    def __init__(
        self,
        description: InstanceDescription,
        instance: SimulatedInstance,
        events: EventQueue,
        times: ReportTimes,
        report_delay_ms: float,
        hooks: WorkerHooks,
        number: int,
        *,
        skip_steps: bool,
        reports_progress: bool,
    ) -> None:
        """`number` is its place among those whose steps end at the same moment. Without `reports_progress` no report is
        made that would tell of nothing but further tokens of requests that decode."""
        self.description = description
        self.instance = instance
        self.report_due_ms = math.inf
        """Before this, no report of it arrives at the scheduler."""
        self._prefills = QueuedPrefills()
        self._sent: deque[SentReport] = deque()
        """Reports on their way to the scheduler."""
        self._events = events
        self._times = times
        self._report_delay_ms = report_delay_ms
        self._hooks = hooks
        self._number = number
        self._skips_steps = skip_steps
        self._reports_progress = reports_progress
        self._likely_steps = _FIRST_RUN_STEPS
        self._run_steps = 0
        self._watchers = 0
        self._step_end: Event | None = None
        self._planning: Event | None = None
        self._is_finishing = False
        """A step is over, and the next is composed in a moment."""
        self._has_news = False
        self._reported_ms = -1.0
        """Reports that left by then have been made, if anybody may see them."""
        self._admitted: list[str] = []
        self._ended: list[str] = []
        self._kv_blocks: list[KvBlocks] = []

    @property
    def is_idle(self) -> bool:
        """Nothing is being computed, and nothing is about to be."""
        return self._step_end is None and self._planning is None and not self._is_finishing

    def submit(self, request: CountedRequest, new_prefill_tokens: int, now_ms: float) -> None:
        """Hand the instance a request, with the tokens that its placement believed it to compute of the prompt. Raises
        `RequestRefused`."""
        self.touch(now_ms)
        self.instance.submit(request)
        self._prefills.add(request.request_id, new_prefill_tokens)
        self.wake(now_ms, request.request_id)

    def present_load(self, now_ms: float) -> PresentLoad:
        """What a request that came now would have to wait for."""
        self.look(now_ms)
        load = self.instance.load()
        return PresentLoad(
            self._prefills.queued_tokens(load.queued_prefill_tokens), load.running_requests + load.queued_requests
        )

    def host_changed(self, changes: KvBlocks, now_ms: float) -> None:
        """Its host's memory holds other blocks from now on, which it reports."""
        self._report_until(math.nextafter(now_ms, 0.0))
        self._kv_blocks.append(changes)
        self._has_news = True
        self._note_due()

    def look(self, now_ms: float) -> None:
        """Let the instance look as it is now."""
        self._end_step_at(now_ms)
        self._report_until(now_ms)
        self._settle(now_ms)

    def glance(self, now_ms: float) -> None:
        """The same for whoever asks for its occupancy and how long its steps took, and for nothing else."""
        self._end_step_at(now_ms)
        self._report_until(now_ms)
        self._glance(now_ms)
        step = self.instance.planned
        if step is not None and step.run is not None:
            self._time(step, step.run.seen)

    def touch(self, now_ms: float) -> None:
        """The same for whoever is about to change it: what is planned ends with the step under way."""
        self.look(now_ms)
        left = self._interrupt()
        if left is not None:
            self._step_end = self._events.at(left.ends_ms, Rank.STEP_END, self._end, place=self._number)

    def wake(self, now_ms: float, admitted_request_id: str | None = None) -> None:
        """It was touched; from now on it reports the admitted request as its own."""
        if admitted_request_id is not None:
            self._admitted.append(admitted_request_id)
        self._has_news = True
        self._note_due()
        if self.is_idle:
            self._planning = self._events.at(now_ms, Rank.PLAN, self._plan, place=self._number)

    def release(self, request_id: str) -> None:
        """Forget a request that another instance has taken over, or that is to begin anew; `touch` before, `wake`
        after."""
        self.instance.abort(request_id)
        self._ended.append(request_id)

    def watch(self, now_ms: float) -> None:
        """From now on every step is to end by itself, until as many `unwatch`."""
        self.touch(now_ms)
        self._watchers += 1

    def unwatch(self) -> None:
        """See `watch`."""
        self._watchers -= 1

    def arrived_reports(self, now_ms: float) -> list[SentReport]:
        """Those that have reached the scheduler since it was last asked."""
        if not self._report_delay_ms:
            self._end_step_at(now_ms)
        self._report_at(self._times.seen_at(now_ms))
        arrived_by_ms = now_ms - self._report_delay_ms
        arrived: list[SentReport] = []
        while self._sent and self._sent[0].sent_ms <= arrived_by_ms:
            arrived.append(self._sent.popleft())
        self._note_due()
        return arrived

    def stop(self, now_ms: float) -> None:
        """The instance dies; it shows what it had become by now."""
        self.look(now_ms)
        for event in (self._step_end, self._planning):
            if event is not None:
                event.cancel()

    def _plan(self, now_ms: float) -> None:
        self._planning = None
        takes_runs = self._skips_steps and not self._watchers
        step = self.instance.plan_step(now_ms, self._likely_steps if takes_runs else 1)
        if step is None:
            return
        self._run_steps = step.steps
        self._step_end = self._events.at(step.ends_ms, Rank.STEP_END, self._end, place=self._number)

    def _end(self, now_ms: float) -> None:
        """The time of what is planned is over."""
        self._is_finishing = True
        self._finish(now_ms)
        self._is_finishing = False
        if self._events.is_last_of_moment:
            self._plan(now_ms)
        else:
            self._planning = self._events.at(now_ms, Rank.PLAN, self._plan, place=self._number)

    def _finish(self, now_ms: float) -> None:
        step = self.instance.planned
        assert step is not None
        self._report_until(math.nextafter(now_ms, 0.0))
        step = self.instance.planned
        assert step is not None
        self._step_end = None
        if self._run_steps == self._likely_steps:
            self._likely_steps = min(2 * self._likely_steps, _LONGEST_RUN_STEPS)
        result = self.instance.finish_step(step)
        self._time(step, step.steps)
        self._note_cache(result.kv_blocks)
        for started in result.started:
            self._prefills.done(started.request_id)
        self._ended += result.finished
        self._has_news = True
        self._note_due()
        self._hooks.stepped(self, result, now_ms)

    def _interrupt(self) -> Step | None:
        """Have a run end with the step under way, which is returned and whose end is to be seen to; None: no run."""
        left = self.instance.planned
        if left is None or left.steps_left == 1 or self._step_end is None:
            return None
        self._likely_steps = max(_FIRST_RUN_STEPS, 2 * (self._run_steps - left.steps_left))
        self._run_steps = 0
        self._step_end.cancel()
        return self.instance.interrupt()

    def _end_step_at(self, now_ms: float) -> None:
        """A step within a run that ends right now is over, and the next is not planned before everything else that
        happens now has happened."""
        step = self.instance.planned
        if step is None or step.run is None or step.run.ends_ms[step.run.done] > now_ms:
            return
        ends_ms = step.run.ends_ms
        place = bisect_left(ends_ms, now_ms)
        if place < len(ends_ms) - 1 and ends_ms[place] == now_ms:
            before_ms = math.nextafter(now_ms, 0.0)
            self._report_until(before_ms)
            self._settle(before_ms)
            self._interrupt()
            self._planning = self._events.at(now_ms, Rank.PLAN, self._plan, place=self._number)
            self._finish(now_ms)

    def _settle(self, at_ms: float) -> None:
        step = self.instance.planned
        if step is None or step.run is None:
            return
        run, done, seen = step.run, step.run.done, step.run.seen
        if run.ends_ms[done] > at_ms:
            return
        changes = self.instance.settle(at_ms)
        if run.done > done:
            self._time(step, run.done)
            self._note_cache(changes)
            self._has_news |= run.done > seen

    def _report_until(self, now_ms: float) -> None:
        """The instance will look different from now on: make the reports that have left and may still be seen."""
        if self.report_due_ms <= now_ms + self._report_delay_ms:
            self._report_at(self._times.seen_at(now_ms))
            for sent_ms in self._times.in_flight(self._reported_ms, now_ms):
                self._report_at(sent_ms)
        if now_ms > self._reported_ms:
            self._reported_ms = now_ms

    def _report_at(self, sent_ms: float) -> None:
        if sent_ms <= self._reported_ms or sent_ms < 0:
            return
        self._reported_ms = sent_ms
        if not (self._has_news or self._may_make_news):
            return
        if self._may_make_news:
            self._glance(sent_ms)
        if self._has_news:
            report = SentReport(
                sent_ms, self.instance.load(), tuple(self._admitted), tuple(self._ended), tuple(self._kv_blocks)
            )
            self._sent.append(report)
            self._admitted.clear()
            self._ended.clear()
            self._kv_blocks.clear()
            self._has_news = False

    def _note_due(self) -> None:
        if self._sent:
            self.report_due_ms = self._sent[0].sent_ms + self._report_delay_ms - EARLY_MS
        elif self._has_news or self._may_make_news:
            self.report_due_ms = self._times.next_seen(self._reported_ms)
        else:
            self.report_due_ms = math.inf

    @property
    def _may_make_news(self) -> bool:
        """Whether what is being computed may give something to report before it ends."""
        return self._step_end is not None and (self._reports_progress or not self.instance.is_run_quiet)

    def _note_cache(self, changes: KvBlocks) -> None:
        if changes.stored or changes.removed:
            self._kv_blocks.append(changes)
            if self._hooks.cached is not None:
                self._hooks.cached(self, changes)

    def _glance(self, at_ms: float) -> None:
        has_stepped = self.instance.glance(at_ms)
        if has_stepped is None:
            self._settle(at_ms)
        elif has_stepped:
            self._has_news = True

    def _time(self, step: Step, stop: int) -> None:
        """Tell how long its steps took, up to `stop`, that were not told."""
        if self._hooks.timed is None or not step.decode_requests:
            return
        run = step.run
        if run is None:
            self._hooks.timed(self, np.array([step.last_step_ms]), step.decode_requests)
        elif run.timed < stop:
            self._hooks.timed(self, run.durations_ms[run.timed : stop], step.decode_requests)
            run.timed = stop
