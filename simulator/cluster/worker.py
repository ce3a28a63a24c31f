"""One instance in simulated time: its steps, and the reports it sends."""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controlplane.model.instance import InstanceDescription, KvBlocks, LoadReport
from simulator.cluster.events import Event, EventQueue, Rank
from simulator.cluster.report_times import EARLY_MS, ReportTimes
from simulator.instance.counted_request import CountedRequest
from simulator.instance.instance import SimulatedInstance
from simulator.instance.step import Step, StepResult

_FIRST_RUN_STEPS = 16
_LONGEST_RUN_STEPS = 1024


@dataclass(frozen=True, slots=True)
class SentReport:
    """What one report tells the scheduler."""

    sent_ms: float
    load: LoadReport
    admitted_request_ids: tuple[str, ...]
    kv_blocks: tuple[KvBlocks, ...]
    """Changes of the prefix cache since the report before, in order."""


@dataclass(frozen=True, slots=True, eq=False)
class WorkerHooks:
    """Who hears of what happens on an instance."""

    stepped: Callable[["Worker", StepResult, float], None]
    """A step, or the last of a run, is over; called before the next is planned."""
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
    ) -> None:
        """`number` is its place among those whose steps end at the same moment."""
        self.description = description
        self.instance = instance
        self.report_due_ms = math.inf
        """Before this, no report of it arrives at the scheduler."""
        self._sent: deque[SentReport] = deque()
        """Reports on their way to the scheduler."""
        self._events = events
        self._times = times
        self._report_delay_ms = report_delay_ms
        self._hooks = hooks
        self._number = number
        self._skips_steps = skip_steps
        self._likely_steps = _FIRST_RUN_STEPS
        self._run_steps = 0
        self._watchers = 0
        self._step_end: Event | None = None
        self._planning: Event | None = None
        self._has_news = False
        self._reported_ms = -1.0
        """Reports that left by then have been made, if anybody may see them."""
        self._admitted: list[str] = []
        self._kv_blocks: list[KvBlocks] = []

    @property
    def is_idle(self) -> bool:
        """Nothing is being computed, and nothing is about to be."""
        return self._step_end is None and self._planning is None

    def submit(self, request: CountedRequest, now_ms: float) -> None:
        """Hand the instance a request. Raises `RequestRefused`."""
        self.touch(now_ms)
        self.instance.submit(request)
        self.wake(now_ms, request.request_id)

    def look(self, now_ms: float) -> None:
        """Let the instance look as it is now."""
        self._end_step_at(now_ms)
        self._report_until(now_ms)
        self._settle(now_ms)

    def touch(self, now_ms: float) -> None:
        """The same for whoever is about to change it: what is planned ends with the step under way."""
        self.look(now_ms)
        left = self._interrupt()
        if left is not None:
            self._step_end = self._events.at(left.ends_ms, Rank.STEP_END, self._finish, place=self._number)

    def wake(self, now_ms: float, admitted_request_id: str | None = None) -> None:
        """It was touched; from now on it reports the admitted request as its own."""
        if admitted_request_id is not None:
            self._admitted.append(admitted_request_id)
        self._has_news = True
        self._note_due()
        if self.is_idle:
            self._planning = self._events.at(now_ms, Rank.PLAN, self._plan, place=self._number)

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
        self._step_end = self._events.at(step.ends_ms, Rank.STEP_END, self._finish, place=self._number)

    def _finish(self, now_ms: float) -> None:
        step = self.instance.planned
        assert step is not None
        self._report_until(math.nextafter(now_ms, 0.0))
        step = self.instance.planned
        assert step is not None
        self._step_end = None
        if self._run_steps == self._likely_steps:
            self._likely_steps = min(2 * self._likely_steps, _LONGEST_RUN_STEPS)
        done = step.steps - step.steps_left
        result = self.instance.finish_step(step)
        self._time(step, done, step.steps)
        self._note_cache(result.kv_blocks)
        self._has_news = True
        self._note_due()
        self._planning = self._events.at(now_ms, Rank.PLAN, self._plan, place=self._number)
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
            self._finish(now_ms)

    def _settle(self, at_ms: float) -> None:
        step = self.instance.planned
        if step is None or step.run is None:
            return
        done = step.run.done
        changes = self.instance.settle(at_ms)
        if step.run.done > done:
            self._time(step, done, step.run.done)
            self._note_cache(changes)
            self._has_news = True

    def _report_until(self, now_ms: float) -> None:
        """The instance will look different from now on: make the reports that have left and may still be seen."""
        if self.report_due_ms <= now_ms + self._report_delay_ms:
            self._report_at(self._times.seen_at(now_ms))
            for sent_ms in self._times.in_flight(self._reported_ms, now_ms):
                self._report_at(sent_ms)
        self._reported_ms = max(self._reported_ms, now_ms)

    def _report_at(self, sent_ms: float) -> None:
        if sent_ms <= self._reported_ms or sent_ms < 0:
            return
        self._reported_ms = sent_ms
        self._settle(sent_ms)
        if self._has_news:
            report = SentReport(sent_ms, self.instance.load(), tuple(self._admitted), tuple(self._kv_blocks))
            self._sent.append(report)
            self._admitted.clear()
            self._kv_blocks.clear()
            self._has_news = False

    def _note_due(self) -> None:
        if self._sent:
            self.report_due_ms = self._sent[0].sent_ms + self._report_delay_ms - EARLY_MS
        elif self._has_news or self._step_end is not None:
            self.report_due_ms = self._times.next_seen(self._reported_ms)
        else:
            self.report_due_ms = math.inf

    def _note_cache(self, changes: KvBlocks) -> None:
        if changes.stored or changes.removed:
            self._kv_blocks.append(changes)

    def _time(self, step: Step, first: int, stop: int) -> None:
        if self._hooks.timed is not None:
            run = step.run
            durations_ms = np.array([step.last_step_ms]) if run is None else run.durations_ms[first:stop]
            self._hooks.timed(self, durations_ms, step.decode_requests)
