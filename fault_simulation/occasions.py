"""Requests and faults that meet in a way that chance alone hardly ever brings about.

A few seeds get one of these besides what they draw anyway, from a random stream of its own: all other seeds stay what
they are. Each is here because a fix that was taken out of the code again was found by no seed before.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec

from fault_simulation.actions import Drain
from fault_simulation.oracle import CHAT_PATH
from fault_simulation.timeline import (
    LARGEST_ANSWER_TOKENS,
    MODEL,
    Behaviour,
    Cut,
    Fault,
    Kill,
    Operation,
    Request,
    Timeline,
)

SHARE: Final = 0.15
"""Of the seeds."""
EARLIEST_S: Final = 8.0
LATEST_S: Final = 20.0


def with_occasion(rng: random.Random, timeline: Timeline) -> Timeline:
    """The timeline, with an occasion if the seed is one of those that get one."""
    if rng.random() >= SHARE:
        return timeline
    return rng.choice(OCCASIONS)(rng, timeline, round(rng.uniform(EARLIEST_S, LATEST_S), 3))


def stop_strings_wait(rng: random.Random, timeline: Timeline, at_s: float) -> Timeline:
    """Clients have stopped to read, so that stop strings wait unread in the frontend while all workers are lost; they
    read on before another worker is there. Large events fill the window of a connection."""
    requests = []
    for _ in range(6):
        early_s, reads_after_s = rng.uniform(0.6, 1.5), rng.uniform(0.3, 2.5)
        body = {"n": 3, "temperature": 1.0, "seed": rng.randrange(1000), "stop": [rng.choice("bfjkqvwxz")]}
        body |= {"logprobs": True, "top_logprobs": 20}
        requests.append(_stream(rng, at_s - early_s, "stalls", 0.1, early_s + reads_after_s, body))
    return _added(timeline, requests, Kill(at_s, timeline.topology.worker_ids, round(rng.uniform(3.0, 5.0), 3)))


def frontend_dies_under_readers(rng: random.Random, timeline: Timeline, at_s: float) -> Timeline:
    """Clients read whole streams, and go on with them at the other frontend."""
    topology = msgspec.structs.replace(timeline.topology, frontends=2)
    requests = [_stream(rng, at_s - rng.uniform(0.2, 1.5), "returns", 60.0) for _ in range(4)]
    death = Kill(at_s, (topology.frontend_ids[0],), round(rng.uniform(3.0, 8.0), 3))
    return _added(msgspec.structs.replace(timeline, topology=topology), requests, death)


def nobody_says_who_decodes(rng: random.Random, timeline: Timeline, at_s: float) -> Timeline:
    """Requests of a worker wait for a scheduler's answer when the first of them turns to another scheduler."""
    topology = msgspec.structs.replace(timeline.topology, policy="arrow", schedulers=2)
    requests = [_stream(rng, at_s + rng.uniform(-0.5, 0.6)) for _ in range(8)]
    for_s = round(rng.uniform(1.0, 3.0), 3)
    cut = Cut(at_s, topology.scheduler_ids, topology.worker_ids, for_s, both_ways=True)
    return _added(msgspec.structs.replace(timeline, topology=topology), requests, cut)


def nobody_takes_what_is_drained(rng: random.Random, timeline: Timeline, at_s: float) -> Timeline:
    """A worker with long requests is drained while all others are away, in a mesh that has nothing else to do or to
    suffer."""
    at_s = round(EARLIEST_S + (at_s - EARLIEST_S) / 2, 3)  # they last for 18 s
    one, *others = timeline.topology.worker_ids
    requests = [_stream(rng, at_s - rng.uniform(0.5, 1.0), more={"max_tokens": 700}) for _ in range(3)]
    death = Kill(round(at_s - 1.5, 3), tuple(others), round(rng.uniform(2.5, 4.5), 3))
    drained = msgspec.structs.replace(timeline, requests=(), faults=(), operations=(Operation(at_s, Drain(one, 0.0)),))
    return _added(drained, requests, death)


OCCASIONS: Final[tuple[Callable[[random.Random, Timeline, float], Timeline], ...]] = (
    stop_strings_wait,
    frontend_dies_under_readers,
    nobody_says_who_decodes,
    nobody_takes_what_is_drained,
)


def _stream(
    rng: random.Random,
    at_s: float,
    behaviour: Behaviour = "reads",
    after_s: float = 0.0,
    for_s: float = 0.0,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> Request:
    """A long one, to the first frontend; `more` of its body."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Tell me of {rng.randrange(1000)}."}],
        "max_tokens": LARGEST_ANSWER_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0.0,
        **more,
    }
    return Request(0, round(at_s, 3), CHAT_PATH, body, 0, behaviour, round(after_s, 3), round(for_s, 3))


def _added(timeline: Timeline, requests: Sequence[Request], fault: Fault) -> Timeline:
    first = len(timeline.requests)
    added = [msgspec.structs.replace(request, number=first + index) for index, request in enumerate(requests)]
    return msgspec.structs.replace(
        timeline,
        requests=tuple(sorted((*timeline.requests, *added), key=lambda request: request.at_s)),
        faults=tuple(sorted((*timeline.faults, fault), key=lambda one: one.at_s)),
    )
