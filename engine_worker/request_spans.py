"""What a worker does with a request, as spans: `engine_queue` before its first step, `prefill` up to its first token,
and `decode` up to its end or to its move. An engine that does not tell of its queue has it in `prefill`."""

from typing import Final

from controlplane.model.request import EngineRequest, StepOutput
from mesh.tracing import Attribute, Span, Tracer

MAX_OPEN: Final = 4096
"""More are given up, the oldest first."""


class RequestSpans:
    """Of the requests of one instance that somebody wants to see."""

    def __init__(self, tracer: Tracer, instance_id: str) -> None:
        self._tracer = tracer
        self._instance_id = instance_id
        self._open: dict[str, tuple[Span, EngineRequest]] = {}

    def __len__(self) -> int:
        """How many are open."""
        return len(self._open)

    def begin(self, request: EngineRequest, *, is_moved: bool = False) -> None:
        """The engine has the request; `is_moved`: with its KV."""
        span = self._start("decode" if is_moved else "prefill", request)
        if not span.is_recorded:
            return
        if len(self._open) >= MAX_OPEN:
            del self._open[next(iter(self._open))]
        self._open[request.request_id] = span, request

    def step(self, output: StepOutput) -> None:
        """The engine has made a step."""
        if not self._open:
            return
        for delta in output.deltas:
            open_one = self._open.get(delta.request_id)
            if open_one is None:
                continue
            span, request = open_one
            if delta.cached_tokens is not None:
                span.set(cached_tokens=delta.cached_tokens)
            if delta.token_ids and span.name == "prefill":
                if delta.queued_ms is not None:
                    self._split_queue(span, request, delta.queued_ms / 1000)
                span.end()
                span = self._start("decode", request)
                self._open[delta.request_id] = span, request
            if delta.finish_reason is not None:
                generated = delta.offset + len(delta.token_ids)
                span.set(generated_tokens=generated, finish_reason=delta.finish_reason.value)
                span.end(delta.error)
                del self._open[delta.request_id]

    def end(self, request_id: str, error: str = "", **attributes: Attribute) -> None:
        """It is not the engine's any more, for a reason that the engine does not know."""
        if (open_one := self._open.pop(request_id, None)) is not None:
            open_one[0].set(**attributes)
            open_one[0].end(error)

    def _split_queue(self, prefill: Span, request: EngineRequest, queued_s: float) -> None:
        """The engine says only now when it has begun."""
        queue = self._start("engine_queue", request)
        queue.start_s = prefill.start_s
        prefill.start_s += queued_s
        queue.end(at_s=prefill.start_s)

    def _start(self, name: str, request: EngineRequest) -> Span:
        span = self._tracer.child(name, request.traceparent)
        span.set(
            request_id=request.request_id,
            instance=self._instance_id,
            prompt_tokens=len(request.prompt_token_ids),
            emitted_tokens=len(request.emitted_token_ids),
        )
        return span
