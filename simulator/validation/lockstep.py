"""Data-parallel engines whose experts are divided among them: they step together, as their collectives force them to.

Each has its own requests and KV; a step lasts as long as the slowest engine's, and an engine without work goes
along with one token.
"""

from collections.abc import Callable, Sequence

from simulator.cost.model import BatchShape, CostModel
from simulator.instance.config import InstanceConfig
from simulator.instance.counted_request import CountedRequest
from simulator.instance.instance import SimulatedInstance
from simulator.report.outcome import RequestOutcome
from simulator.traces.request import TraceRequest

StepOfAll = Callable[[Sequence[BatchShape | None]], float]
"""Duration of a common step, from each engine's batch; None: it has none."""

_WAITING_WEIGHT = 4
"""vLLM gives a request to the engine with the least 4 x waiting + running."""


def run_in_lockstep(
    requests: Sequence[TraceRequest], engines: int, config: InstanceConfig, step_ms: StepOfAll
) -> list[RequestOutcome]:
    """Outcomes in the order of `requests`, which are sorted by arrival."""
    seen = [_SeenBatch() for _ in range(engines)]
    instances = [SimulatedInstance(config, shape) for shape in seen]
    first_ms: dict[str, float] = {}
    last_ms: dict[str, float] = {}
    now_ms, arrived = 0.0, 0
    while arrived < len(requests) or any(instance.request_ids for instance in instances):
        while arrived < len(requests) and requests[arrived].arrival_s * 1000 <= now_ms:
            request = requests[arrived]
            counted = CountedRequest(str(arrived), request.input_tokens, request.output_tokens)
            min(instances, key=_load).submit(counted)
            arrived += 1
        steps = [instance.plan_step(now_ms) for instance in instances]
        if not any(steps):
            now_ms = requests[arrived].arrival_s * 1000
            continue
        now_ms += step_ms([shape.batch if step else None for shape, step in zip(seen, steps, strict=True)])
        for instance, step in zip(instances, steps, strict=True):
            if step:
                result = instance.finish_step(step)
                first_ms.update((started.request_id, now_ms) for started in result.started)
                last_ms.update((request_id, now_ms) for request_id in result.finished)
    return [_outcome(request, first_ms[str(index)], last_ms[str(index)]) for index, request in enumerate(requests)]


class _SeenBatch(CostModel):
    """Stands in for a cost model to learn what the instance would run; its duration is not used."""

    def __init__(self) -> None:
        self.batch = BatchShape()

    def step_ms(self, batch: BatchShape) -> float:
        self.batch = batch
        return 1.0


def _load(instance: SimulatedInstance) -> int:
    load = instance.load()
    return _WAITING_WEIGHT * load.queued_requests + load.running_requests


def _outcome(request: TraceRequest, first_ms: float, last_ms: float) -> RequestOutcome:
    return RequestOutcome(
        arrival_s=request.arrival_s,
        finished_s=last_ms / 1000,
        first_token_s=first_ms / 1000,
        last_token_s=last_ms / 1000,
        input_tokens=request.input_tokens,
        output_tokens=request.output_tokens,
    )
