"""What an engine does at each step, and how long requests wait, compute their prompt and decode: what vLLM calls the
stats of iterations and of finished requests.

Each phase of a request counts where it ran. One that moved in mid-decode has its queue and its prefill at its first
instance, and a part of its decode at each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from controlplane.model.instance import LoadReport
from controlplane.model.request import StepOutput
from engine_worker.metrics import WorkerMetrics

MAX_OPEN: Final = 65_536
"""Far above what an instance holds; more are given up, the oldest first."""


@dataclass(slots=True)
class _Open:
    began_s: float
    """When the engine got the request, and then when it began with it, where the engine tells."""
    first_token_s: float | None


class EngineStats:
    """Of one instance; a request is followed from `begin` to a delta that ends it or to `end`."""

    def __init__(self, metrics: WorkerMetrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._open: dict[str, _Open] = {}
        self._tokens = 0
        """Computed and generated up to the last step."""

    def __len__(self) -> int:
        """How many are open."""
        return len(self._open)

    def begin(self, request_id: str, *, is_moved: bool = False) -> None:
        """The engine has the request; `is_moved`: with its KV."""
        if len(self._open) >= MAX_OPEN:
            del self._open[next(iter(self._open))]
        now_s = self._clock()
        self._open[request_id] = _Open(now_s, now_s if is_moved else None)

    def step(self, output: StepOutput, load: LoadReport) -> None:
        """The engine has made a step and has this load now. Deltas amid an answer, nearly all, cost two comparisons."""
        self._metrics.steps.inc()
        self._metrics.step_seconds.observe(load.step_ms / 1000)
        tokens = load.prefilled_tokens_total + load.generated_tokens_total
        if tokens > self._tokens:
            self._metrics.step_tokens.observe(tokens - self._tokens)
            self._tokens = tokens
        for delta in output.deltas:
            if delta.cached_tokens is not None and delta.token_ids:
                self._first_token(delta.request_id, delta.queued_ms)
            if delta.finish_reason is not None:
                self.end(delta.request_id)

    def end(self, request_id: str) -> None:
        """It is not the engine's any more: done, moved or given up."""
        request = self._open.pop(request_id, None)
        if request is None or request.first_token_s is None:
            return
        now_s = self._clock()
        self._metrics.decode_seconds.observe(now_s - request.first_token_s)
        self._metrics.inference_seconds.observe(now_s - request.began_s)

    def _first_token(self, request_id: str, queued_ms: float | None) -> None:
        request = self._open.get(request_id)
        if request is None or request.first_token_s is not None:
            return
        request.first_token_s = self._clock()
        queued_s = min((queued_ms or 0.0) / 1000, request.first_token_s - request.began_s)
        request.began_s += queued_s
        if queued_ms is not None:
            self._metrics.queue_seconds.observe(queued_s)
        self._metrics.prefill_seconds.observe(request.first_token_s - request.began_s)
