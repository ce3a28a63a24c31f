"""Algorithm 1 as it is printed: loops, one request at a time, every variance from scratch."""

from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.model.running_request import RunningRequest
from controlplane.policies.rescheduling.parameters import ReschedulerParameters


@dataclass(frozen=True, slots=True)
class NaiveInstance:
    instance_id: str
    capacity_tokens: int
    step_ms: float
    may_receive: bool
    requests: tuple[RunningRequest, ...]


@dataclass(frozen=True, slots=True)
class NaiveMove:
    request_id: str
    source: str
    target: str
    gain: float


class NaiveRescheduler:
    def __init__(self, parameters: ReschedulerParameters, *, predicts: bool) -> None:
        self._parameters = parameters
        self._predicts = predicts
        self._points = parameters.horizon_steps if predicts else 0
        weights = [parameters.decay**t for t in range(parameters.horizon_steps)]
        self._beta = [weight / sum(weights) for weight in weights]

    def moves(self, instances: Sequence[NaiveInstance]) -> list[NaiveMove]:
        """Every feasible move that lowers the variance, best first."""
        workloads, bound = self._workloads_and_bound(instances)
        overloaded = [each for each, load in zip(instances, workloads, strict=True) if load > bound]
        underloaded = [
            each for each, load in zip(instances, workloads, strict=True) if load < bound and each.may_receive
        ]
        before = self._expected_variance(instances)
        moves = []
        for source in overloaded:
            for target in underloaded:
                for request in source.requests:
                    if source is target or not self._is_worth_it(request, source) or not self._fits(request, target):
                        continue
                    gain = before - self._expected_variance(_moved(instances, request, source, target))
                    if gain > 0:
                        moves.append(NaiveMove(request.request_id, source.instance_id, target.instance_id, gain))
        return sorted(moves, key=lambda move: -move.gain)

    def is_on_the_edge(self, instances: Sequence[NaiveInstance]) -> bool:
        """Whether rounding decides if an instance is overloaded or underloaded."""
        workloads, bound = self._workloads_and_bound(instances)
        return any(load > 0 and abs(load - bound) <= 1e-9 * bound for load in workloads)

    def _workloads_and_bound(self, instances: Sequence[NaiveInstance]) -> tuple[list[float], float]:
        """Lines 13 to 16."""
        workloads = [self._workload(instance) for instance in instances]
        return workloads, (1 + self._parameters.theta) * sum(workloads) / len(instances)

    def _workload(self, instance: NaiveInstance) -> float:
        if not self._predicts:
            return self._load(instance.requests, 0)
        return sum(weight * self._load(instance.requests, t) for t, weight in enumerate(self._beta, start=1))

    def _tokens(self, request: RunningRequest, t: int) -> int:
        ahead = t * self._parameters.stride_tokens
        gone = request.remaining_tokens is not None and ahead >= request.remaining_tokens
        return 0 if t > 0 and gone else request.context_tokens + ahead

    def _load(self, requests: Sequence[RunningRequest], t: int) -> int:
        return sum(self._tokens(request, t) for request in requests)

    def _is_worth_it(self, request: RunningRequest, source: NaiveInstance) -> bool:
        if not self._predicts:
            return True
        if request.remaining_tokens is None:
            return False
        token_ms = self._parameters.migration_token_us / 1000
        migration_ms = self._parameters.migration_fixed_ms + token_ms * request.context_tokens
        return request.remaining_tokens * source.step_ms > migration_ms

    def _fits(self, request: RunningRequest, target: NaiveInstance) -> bool:
        limit = self._parameters.memory_fraction * target.capacity_tokens
        return all(
            self._tokens(request, t) + self._load(target.requests, t) <= limit
            for t in range(self._points + 1)
            if t == 0 or self._tokens(request, t) > 0
        )

    def _expected_variance(self, instances: Sequence[NaiveInstance]) -> float:
        now = _variance([self._load(instance.requests, 0) for instance in instances])
        if not self._predicts:
            return now
        return now + sum(
            weight * _variance([self._load(instance.requests, t) for instance in instances])
            for t, weight in enumerate(self._beta, start=1)
        )


def _moved(
    instances: Sequence[NaiveInstance], request: RunningRequest, source: NaiveInstance, target: NaiveInstance
) -> list[NaiveInstance]:
    after = []
    for each in instances:
        requests = each.requests
        if each is source:
            requests = tuple(other for other in requests if other is not request)
        if each is target:
            requests = (*requests, request)
        after.append(NaiveInstance(each.instance_id, each.capacity_tokens, each.step_ms, each.may_receive, requests))
    return after


def _variance(values: Sequence[int]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values)
