"""Makes a failing timeline as small as it gets while it still fails in the same way.

Delta debugging (Zeller and Hildebrandt's ddmin) over faults, what operators do, then requests; then each fault is made
shorter, each request simpler, and the mesh smaller. Every step is a whole simulation, so their number is bounded: what
is left when it is reached is told, minimal or not.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import msgspec

from fault_simulation.timeline import MODEL, Cut, Fault, Kill, Operation, Request, Slow, Terminate, Timeline, Topology

MOST_RUNS: Final = 150

Item = TypeVar("Item")


class _Exhausted(Exception):
    """No more runs."""


class _Trial:
    """Asks whether a timeline fails, so many times."""

    def __init__(self, fails: Callable[[Timeline], bool], timeline: Timeline, most_runs: int) -> None:
        self.best = timeline
        self._fails = fails
        self._left = most_runs

    def keeps(self, timeline: Timeline) -> bool:
        """Whether it fails still; then it is the best so far. Raises _Exhausted."""
        if timeline == self.best:
            return False
        if not self._left:
            raise _Exhausted
        self._left -= 1
        if not self._fails(timeline):
            return False
        self.best = timeline
        return True

    def change(self, **changes: Any) -> bool:
        """The same for the best so far with some fields replaced."""
        return self.keeps(msgspec.structs.replace(self.best, **changes))


def shrink(timeline: Timeline, fails: Callable[[Timeline], bool], most_runs: int = MOST_RUNS) -> Timeline:
    """A smaller timeline for which `fails` is still true, as it must be for the given one."""
    trial = _Trial(fails, timeline, most_runs)
    try:
        while True:
            before = trial.best
            _fewer(trial.best.faults, lambda faults: trial.change(faults=faults))
            _fewer(trial.best.operations, lambda operations: trial.change(operations=operations))
            _fewer(trial.best.requests, lambda requests: trial.change(requests=requests))
            _smaller_mesh(trial)
            _simpler_faults(trial)
            _simpler_requests(trial)
            if trial.best == before:
                return before
    except _Exhausted:
        return trial.best


def _fewer(items: tuple[Item, ...], keeps: Callable[[tuple[Item, ...]], bool]) -> None:
    """ddmin: leave out as many items as possible, in ever smaller chunks."""
    if items and keeps(()):
        return
    chunks = 2
    while len(items) > 1:
        size = -(-len(items) // chunks)
        for start in range(0, len(items), size):
            rest = items[:start] + items[start + size :]
            if keeps(rest):
                items, chunks = rest, max(chunks - 1, 2)
                break
        else:
            if size == 1:
                return
            chunks = min(len(items), 2 * chunks)


def _smaller_mesh(trial: _Trial) -> None:
    for make in _smaller(trial.best.topology):
        changed = make(trial.best.topology)
        if changed != trial.best.topology:
            trial.keeps(_fitted(trial.best, changed))


def _smaller(topology: Topology) -> Iterator[Callable[[Topology], Topology]]:
    replace = msgspec.structs.replace
    fewest = {"frontends": 1, "schedulers": 1, "monitors": 1}
    if not topology.supervised:
        fewest |= {"planners": 0, "predictors": 0, "routers": 0, "large": 0}
    for name, least in fewest.items():
        for _ in range(getattr(topology, name) - least):
            yield lambda now, name=name: replace(now, **{name: getattr(now, name) - 1})  # type: ignore[misc]
    for _ in range(len(topology.phases) - 1):
        yield lambda now: replace(now, phases=now.phases[:-1]) if len(now.phases) > 1 else now
    yield lambda now: replace(now, phases=("any",) * len(now.phases))
    yield lambda now: replace(now, policy="round_robin")
    yield lambda now: replace(now, rescheduler="off")
    yield lambda now: replace(now, framed=False)
    yield lambda now: replace(now, kv_blocks=Topology().kv_blocks)
    yield lambda now: replace(now, instance_wait_s=Topology().instance_wait_s)


def _fitted(timeline: Timeline, topology: Topology) -> Timeline:
    """On another topology: without faults of those that are not there any more."""
    gone = set(timeline.topology.member_ids) - set(topology.member_ids)
    is_cascade = topology.routers and topology.large
    requests = tuple(
        msgspec.structs.replace(
            request,
            frontend=request.frontend % topology.frontends,
            body=request.body if is_cascade else _without_cascade(request.body),
        )
        for request in timeline.requests
    )
    faults = tuple(fitted for fault in timeline.faults if (fitted := _without(fault, gone)) is not None)
    operations = tuple(each for each in timeline.operations if not gone & set(_named(each)))
    return Timeline(timeline.seed, topology, requests, faults, operations)


def _without_cascade(body: dict[str, Any]) -> dict[str, Any]:
    """The same request to the first model."""
    return {**{name: value for name, value in body.items() if name != "penstock"}, "model": MODEL}


def _named(operation: Operation) -> Iterator[str]:
    """Members that it is about."""
    for field in ("to", "worker", "member"):
        yield getattr(operation.action, field, "")


def _without(fault: Fault, gone: set[str]) -> Fault | None:
    def left(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in names if name not in gone)

    match fault:
        case Kill() | Terminate():
            names = left(fault.names)
            return msgspec.structs.replace(fault, names=names) if names else None
        case Cut():
            senders, receivers = left(fault.senders), left(fault.receivers)
            both = bool(senders and receivers)
            return msgspec.structs.replace(fault, senders=senders, receivers=receivers) if both else None
        case Slow():
            return fault if not gone & {fault.first, fault.second} else None
    return fault if getattr(fault, "name", "") not in gone else None


def _simpler_faults(trial: _Trial) -> None:
    for index in range(len(trial.best.faults)):
        for field in ("names", "senders", "receivers"):
            if len(getattr(trial.best.faults[index], field, ())) > 1:
                _fewer_names(trial, index, field)
        while (for_s := getattr(trial.best.faults[index], "for_s", 0.0)) > 0.2:
            if not _replace_fault(trial, index, for_s=round(for_s / 2, 3)):
                break


def _fewer_names(trial: _Trial, index: int, field: str) -> None:
    _fewer(
        getattr(trial.best.faults[index], field),
        lambda names: bool(names) and _replace_fault(trial, index, **{field: names}),
    )


def _replace_fault(trial: _Trial, index: int, **changes: Any) -> bool:
    faults = list(trial.best.faults)
    faults[index] = msgspec.structs.replace(faults[index], **changes)
    return trial.change(faults=tuple(faults))


def _simpler_requests(trial: _Trial) -> None:
    for index in range(len(trial.best.requests)):
        for simpler in (_plain_client, _plain_body, _short_prompt):
            requests = list(trial.best.requests)
            requests[index] = simpler(requests[index])
            trial.change(requests=tuple(requests))


def _plain_client(request: Request) -> Request:
    return msgspec.structs.replace(request, behaviour="reads", after_s=0.0, for_s=0.0)


def _plain_body(request: Request) -> Request:
    """Without what need not be asked for."""
    kept = ("model", "penstock", "prompt", "messages", "max_tokens", "stream", "stream_options", "ignore_eos")
    body = {name: value for name, value in request.body.items() if name in kept}
    return msgspec.structs.replace(request, body={**body, "temperature": 0.0})


def _short_prompt(request: Request) -> Request:
    body = dict(request.body)
    if "messages" in body:
        body["messages"] = [{"role": "user", "content": "Hello"}]
    else:
        body["prompt"] = "Hello"
    return msgspec.structs.replace(request, body=body)
