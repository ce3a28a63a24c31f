"""Everything that a seed decides before a simulation runs. Frozen values, kept as JSON: a timeline that was found to
fail is shortened (`shrink`) and stays as a test, whatever becomes of `draw`.

Times are virtual seconds. Until `FIRST_REQUEST_S` the mesh comes up undisturbed; from `HEALED_S` on nothing is broken
any more, what is away comes back, and the mesh has until `JUDGED_S` to be as good as new.
"""

import random
from typing import Any, Final, Literal, TypeAlias

import msgspec

from fault_simulation.oracle import CHAT_PATH, COMPLETIONS_PATH

MODEL: Final = "model"
CLIENT: Final = "client"
STORE: Final = "store"
FIRST_REQUEST_S: Final = 5.0
LAST_REQUEST_S: Final = 24.0
FIRST_FAULT_S: Final = 6.0
HEALED_S: Final = 28.0
JUDGED_S: Final = 45.0
LARGEST_ANSWER_TOKENS: Final = 400

Phase: TypeAlias = Literal["any", "prefill", "decode"]
Behaviour: TypeAlias = Literal["reads", "leaves", "stalls", "returns"]


class Topology(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which processes there are besides the store, each on a machine of its own."""

    frontends: int = 1
    schedulers: int = 1
    monitors: int = 1
    phases: tuple[Phase, ...] = ("any", "any")
    """Of each worker."""
    kv_blocks: int = 4096
    """Of each worker."""
    policy: str = "lmetric"
    rescheduler: Literal["off", "current", "predicted"] = "off"
    instance_wait_s: float = 30.0
    """For how long requests wait for an instance; nothing is away for longer than by default, so that nobody is ever
    given up then."""

    @property
    def frontend_ids(self) -> tuple[str, ...]:
        """Names of the frontends."""
        return tuple(f"frontend-{index}" for index in range(self.frontends))

    @property
    def scheduler_ids(self) -> tuple[str, ...]:
        """Names of the schedulers."""
        return tuple(f"scheduler-{index}" for index in range(self.schedulers))

    @property
    def monitor_ids(self) -> tuple[str, ...]:
        """Names of the monitors."""
        return tuple(f"monitor-{index}" for index in range(self.monitors))

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """Names of the workers."""
        return tuple(f"worker-{index}" for index in range(len(self.phases)))

    @property
    def member_ids(self) -> tuple[str, ...]:
        """Names of all members of the mesh, in the order in which they are started."""
        return (*self.monitor_ids, *self.scheduler_ids, *self.worker_ids, *self.frontend_ids)


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request, and who sends it."""

    number: int
    at_s: float
    path: str
    body: dict[str, Any]
    frontend: int = 0
    """Which frontend is asked first; one that is away is not asked twice."""
    behaviour: Behaviour = "reads"
    after_s: float = 0.0
    """Seconds from the request to when its client leaves, stops to read, or cuts its connection to come back."""
    for_s: float = 0.0
    """How long it does not read, or stays away. One that returns also does so if its connection breaks."""


class Kill(msgspec.Struct, frozen=True, tag=True):
    """kill -9; they are started again after `for_s`. What they had in memory is lost."""

    at_s: float
    names: tuple[str, ...]
    for_s: float


class Terminate(msgspec.Struct, frozen=True, tag=True):
    """SIGTERM to each, one after the other `apart_s` seconds apart; started again once they have ended."""

    at_s: float
    names: tuple[str, ...]
    apart_s: float


class Pause(msgspec.Struct, frozen=True, tag=True):
    """SIGSTOP, and SIGCONT after `for_s`."""

    at_s: float
    name: str
    for_s: float


class Cut(msgspec.Struct, frozen=True, tag=True):
    """Nothing gets from each of the senders to each of the receivers; nor back, if it is `both_ways`."""

    at_s: float
    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    for_s: float
    both_ways: bool


class Slow(msgspec.Struct, frozen=True, tag=True):
    """Whatever goes between two machines takes longer."""

    at_s: float
    first: str
    second: str
    latency_s: float
    for_s: float


class Compact(msgspec.Struct, frozen=True, tag=True):
    """The store forgets its history."""

    at_s: float


class Wipe(msgspec.Struct, frozen=True, tag=True):
    """The store is killed, its disk is emptied, and it is started again after `for_s`."""

    at_s: float
    for_s: float


class DeleteKeys(msgspec.Struct, frozen=True, tag=True):
    """Somebody deletes what stands in the store, its leases left alone: `share` of the keys, which ones is drawn
    from `draw`."""

    at_s: float
    share: float
    draw: int


class FullDisk(msgspec.Struct, frozen=True, tag=True):
    """The store's disk is full."""

    at_s: float
    for_s: float


class StepClock(msgspec.Struct, frozen=True, tag=True):
    """A machine's wall clock is set."""

    at_s: float
    name: str
    by_s: float


Fault: TypeAlias = Kill | Terminate | Pause | Cut | Slow | Compact | Wipe | DeleteKeys | FullDisk | StepClock


class Timeline(msgspec.Struct, frozen=True):
    """One simulation."""

    seed: int
    """Decides what the timeline leaves open: latencies, the chance that the roles take, torn writes. Each machine and
    each link draws for itself, so what is left out of a timeline disturbs the rest as little as possible."""
    topology: Topology
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]

    def to_json(self) -> str:
        """What `read_timeline` reads."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode() + "\n"


def read_timeline(content: bytes | str) -> Timeline:
    """Raises msgspec.ValidationError for what is no timeline."""
    return msgspec.json.decode(content, type=Timeline)


def draw(seed: int) -> Timeline:
    """The timeline of a seed."""
    topology = _draw_topology(random.Random(f"{seed}/topology"))
    count = random.Random(f"{seed}/requests").randint(12, 30)
    requests = [_draw_request(random.Random(f"{seed}/request/{number}"), number, topology) for number in range(count)]
    rng = random.Random(f"{seed}/faults")
    faults = [_draw_fault(random.Random(f"{seed}/fault/{index}"), topology) for index in range(rng.randint(1, 8))]
    faults += _draw_long_cut(random.Random(f"{seed}/long cut"), topology)
    return Timeline(
        seed,
        topology,
        tuple(sorted(requests, key=lambda request: request.at_s)),
        tuple(sorted(faults, key=lambda fault: fault.at_s)),
    )


def _draw_topology(rng: random.Random) -> Topology:
    workers = rng.randint(2, 4)
    phases: tuple[Phase, ...] = tuple("any" for _ in range(workers))
    policy = rng.choice(("lmetric", "lmetric", "lmetric_plus", "round_robin", "least_loaded", "arrow"))
    if workers > 2 and rng.random() < 0.25:
        kinds: tuple[Phase, ...] = ("prefill", "decode", "any")
        phases = ("prefill", "decode", *rng.choices(kinds, k=workers - 2))
    topology = Topology(
        frontends=rng.choice((1, 1, 2)),
        schedulers=rng.choice((1, 2)),
        monitors=rng.choice((1, 1, 2)),
        phases=phases,
        kv_blocks=rng.choice((4096, 4096, 160)),
        policy=policy,
        rescheduler=rng.choice(("off", "off", "current", "predicted")),
    )
    return msgspec.structs.replace(topology, instance_wait_s=rng.choice((30.0, 30.0, 30.0, 4.0)))


def _draw_request(rng: random.Random, number: int, topology: Topology) -> Request:
    body = _draw_body(rng)
    path = CHAT_PATH if "messages" in body else COMPLETIONS_PATH
    at_s = round(rng.uniform(FIRST_REQUEST_S, LAST_REQUEST_S), 3)
    frontend = rng.randrange(topology.frontends)
    chance = rng.random()
    if chance < 0.1:
        return Request(number, at_s, path, body, frontend, "leaves", round(rng.expovariate(1.0), 3))
    if chance < 0.15:
        after_s, for_s = rng.uniform(0.0, 1.0), rng.uniform(0.5, HEALED_S - LAST_REQUEST_S)
        return Request(number, at_s, path, body, frontend, "stalls", round(after_s, 3), round(for_s, 3))
    if chance < 0.35 and body["stream"] and "logprobs" not in body:  # of others, the rest cannot be had
        return Request(
            number,
            at_s,
            path,
            body,
            frontend,
            "returns",
            round(rng.expovariate(0.3), 3),
            round(rng.uniform(0.0, 3.0), 3),
        )
    return Request(number, at_s, path, body, frontend)


def _draw_body(rng: random.Random) -> dict[str, Any]:
    """No `logit_bias`: a map of a protobuf message has no fixed order on the wire, and so no fixed digest."""
    common = rng.choice(("", "", "Of what was said before, this is the part that all have in common. " * 4))
    words = common + " ".join(str(rng.randrange(1000)) for _ in range(rng.choice((3, 20, 60, 200))))
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": rng.choice((1, 8, 40, 80, 80, 200, LARGEST_ANSWER_TOKENS)),
        "stream": rng.random() < 0.8,
        "n": rng.choice((1, 1, 1, 2, 3)),
        "temperature": rng.choice((0.0, 1.0)),
    }
    if rng.random() < 0.3:
        body["ignore_eos"] = True
    if rng.random() < 0.5:
        body["seed"] = rng.randrange(1000)
    if rng.random() < 0.3:
        body["stop"] = [rng.choice("aeiou0123"), *rng.choices(("the", "zz", "ab", "\n"), k=rng.randrange(3))]
    if rng.random() < 0.2:
        body["priority"] = rng.choice((-1, 1))
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    is_chat = rng.random() < 0.5
    if rng.random() < 0.2:
        body.update({"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2})
    if is_chat:
        return {**body, "messages": [{"role": "user", "content": words}]}
    if "logprobs" not in body and rng.random() < 0.2:
        body["echo"] = True
    return {**body, "prompt": words if rng.random() < 0.8 else [words, words[::-1]]}


def _draw_long_cut(rng: random.Random, topology: Topology) -> list[Fault]:
    """Longer than a lease and the grace after it: nobody but the store misses the worker, which is busy."""
    if rng.random() >= 0.15:
        return []
    at_s = round(rng.uniform(FIRST_FAULT_S, HEALED_S - 16.0), 3)
    worker = rng.choice(topology.worker_ids)
    return [Cut(at_s, (worker,), (STORE,), round(rng.uniform(11.0, 14.0), 3), both_ways=True)]


def _draw_fault(rng: random.Random, topology: Topology) -> Fault:
    at_s = round(rng.uniform(FIRST_FAULT_S, HEALED_S - 4.0), 3)
    for_s = round(min(rng.choice((0.3, 1.0, 3.0, 8.0, 15.0)) * rng.uniform(0.7, 1.3), HEALED_S - at_s), 3)
    names = (STORE, *topology.member_ids)
    kinds = {
        "kill": 8, "kill workers": 1, "terminate": 4, "rolling": 1, "pause": 4, "cut": 6, "isolate": 2, "slow": 2,
        "compact": 1, "wipe": 1, "delete": 2, "full disk": 1, "clock": 2,
    }  # fmt: skip
    match rng.choices(list(kinds), list(kinds.values()))[0]:
        case "kill":
            return Kill(at_s, tuple(sorted(rng.sample(names, rng.choice((1, 1, 1, 2))))), for_s)
        case "kill workers":
            return Kill(at_s, topology.worker_ids, for_s)
        case "terminate":
            return Terminate(at_s, (rng.choice(names),), 0.0)
        case "rolling":
            return Terminate(at_s, tuple(rng.sample(names, len(names))), round(rng.uniform(0.5, 2.0), 3))
        case "pause":
            return Pause(at_s, rng.choice(names), for_s)
        case "cut":
            one, other = rng.sample((*names, CLIENT), 2)
            return Cut(at_s, (one,), (other,), for_s, rng.random() < 0.6)
        case "isolate":
            one = rng.choice(names)
            others = [name for name in names if name != one]
            return Cut(at_s, (one,), tuple(sorted(rng.sample(others, rng.randint(1, len(others))))), for_s, True)
        case "slow":
            one, other = rng.sample(names, 2)
            return Slow(at_s, one, other, rng.choice((0.02, 0.1, 0.4)), for_s)
        case "compact":
            return Compact(at_s)
        case "wipe":
            return Wipe(at_s, for_s)
        case "delete":
            return DeleteKeys(at_s, rng.choice((0.1, 0.5, 1.0)), rng.getrandbits(32))
        case "full disk":
            return FullDisk(at_s, for_s)
        case _:
            return StepClock(at_s, rng.choice(names), rng.choice((-3600.0, -5.0, 5.0, 86_400.0)))
