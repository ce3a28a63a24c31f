"""One instance in simulated time: its steps, and the reports it sends."""

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

from controlplane.model.instance import InstanceDescription, KvBlocks, LoadReport
from simulator.cluster.ledger import Ledger
from simulator.instance.counted_request import CountedRequest
from simulator.instance.instance import Instance
from simulator.instance.step import Step


@dataclass(frozen=True, slots=True)
class SentReport:
    """What one report tells the scheduler."""

    sent_ms: float
    load: LoadReport
    admitted_request_ids: tuple[str, ...]
    kv_blocks: tuple[KvBlocks, ...]
    """Changes of the prefix cache since the report before, in order."""


class Worker:
    """Advances from moment to moment; between two moments nobody submits anything.

    `looks_ms` are the times, ascending, at which somebody looks at the instance: its reports leave then.
    """

    def __init__(
        self,
        description: InstanceDescription,
        instance: Instance,
        ledger: Ledger,
        looks_ms: list[float],
        skip_steps: bool,
    ) -> None:
        self.description = description
        self.instance = instance
        self.sent: deque[SentReport] = deque()
        """Reports on their way to the scheduler."""
        self.due_ms = math.inf
        """Before this there is nothing to advance."""
        self._ledger = ledger
        self._looks_ms = [*looks_ms, math.inf]
        self._look = 0
        self._skip_steps = skip_steps
        self._step: Step | None = None
        self._free_ms = 0.0
        """From when on the instance can plan its next step."""
        self._is_idle = True
        self._has_news = False
        self._admitted: list[str] = []
        self._kv_blocks: list[KvBlocks] = []

    def submit(self, request: CountedRequest, now_ms: float) -> None:
        """Hand the instance a request. Raises `RequestRefused`."""
        self.instance.submit(request)
        self._admitted.append(request.request_id)
        self._note_news(now_ms)
        if self._is_idle:
            self._is_idle = False
            self._free_ms = now_ms
        self.due_ms = min(self.due_ms, now_ms)

    def advance(self, until_ms: float) -> None:
        """Take all steps that end, and send all reports that leave, by `until_ms`."""
        while True:
            if self._step is None and not self._is_idle and self._free_ms < until_ms:
                self._plan(until_ms)
            step = self._step
            ends_ms = math.inf if step is None else step.ends_ms
            look_ms = self._looks_ms[self._look] if self._has_news else math.inf
            if min(ends_ms, look_ms) > until_ms or (step is None and look_ms == math.inf):
                is_ready = step is None and not self._is_idle
                self.due_ms = self._free_ms if is_ready else min(ends_ms, look_ms)
                return
            if step is not None and ends_ms <= look_ms:
                self._finish(step)
            else:
                self._report(look_ms)

    def unfinished(self) -> dict[str, int]:
        """Tokens that each request has emitted in all; what a failure leaves behind."""
        return {each: self.instance.generated_tokens(each) for each in self.instance.request_ids}

    def _plan(self, until_ms: float) -> None:
        self._look = bisect_left(self._looks_ms, self._free_ms, self._look)
        horizon_ms = until_ms if self._skip_steps else -math.inf
        self._step = self.instance.plan_step(self._free_ms, horizon_ms, self._looks_ms[self._look])
        self._is_idle = self._step is None

    def _finish(self, step: Step) -> None:
        now_ms, now_s = step.ends_ms, step.ends_ms / 1000
        result = self.instance.finish_step(step)
        for started in result.started:
            self._ledger.started(started.request_id, started.cached_prompt_tokens, now_s)
        for request_id in result.finished:
            self._ledger.finished(request_id, now_s)
        if result.kv_blocks.stored or result.kv_blocks.removed:
            self._kv_blocks.append(result.kv_blocks)
        self._step, self._free_ms = None, now_ms
        self._note_news(now_ms)

    def _report(self, now_ms: float) -> None:
        self.sent.append(SentReport(now_ms, self.instance.load(), tuple(self._admitted), tuple(self._kv_blocks)))
        self._admitted.clear()
        self._kv_blocks.clear()
        self._has_news = False
        self._look += 1

    def _note_news(self, now_ms: float) -> None:
        if not self._has_news:
            self._has_news = True
            self._look = bisect_left(self._looks_ms, now_ms, self._look)
