"""Everything that a seed decides before a simulation runs. Frozen values, kept as JSON: a timeline that was found to
fail is shortened (`shrink`) and stays as a test, whatever becomes of `draw`.

Times are virtual seconds. Until `FIRST_REQUEST_S` the mesh comes up undisturbed; from `HEALED_S` on nothing is broken
any more, what is away comes back, and the mesh has until `JUDGED_S` to be as good as new.
"""

from collections.abc import Iterator
from typing import Any, Final, Literal, TypeAlias

import msgspec

from fault_simulation.actions import OperatorAction

MODEL: Final = "model"
LARGE: Final = "large"
"""A second model, of which a topology may have instances."""
CASCADE: Final = "cascade"
"""Of both models, where there is a router."""
ADAPTERS: Final = ("poet", "critic", "judge")
"""LoRA adapters of the first model, with which workers may be started."""
CLIENT: Final = "client"
STORE: Final = "store"
FIRST_REQUEST_S: Final = 5.0
LAST_REQUEST_S: Final = 24.0
FIRST_FAULT_S: Final = 6.0
HEALED_S: Final = 28.0
JUDGED_S: Final = 45.0
LARGEST_ANSWER_TOKENS: Final = 400

Phase: TypeAlias = Literal["any", "prefill", "decode"]
Behaviour: TypeAlias = Literal["reads", "leaves", "stalls", "returns", "polls"]


class Topology(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which processes there are besides the store, each on a machine of its own."""

    supervised: bool = False
    """Whether `penstock up` starts them, with the store inside its process, and names them its way."""

    framed: bool = False
    """Whether their streams go in frames, or over gRPC as with an earlier release."""

    frontends: int = 1
    schedulers: int = 1
    monitors: int = 1
    planners: int = 0
    predictors: int = 0
    routers: int = 0
    """Of a cascade of both models."""
    phases: tuple[Phase, ...] = ("any", "any")
    """Of each worker of the first model."""
    large: int = 0
    """Workers of the second model."""
    kv_blocks: int = 4096
    """Of each worker."""
    policy: str = "penstock"
    rescheduler: Literal["off", "current", "predicted", "trajectories"] = "off"
    host_kv_blocks: int = 0
    """Of the store of KV blocks that all workers share as if they were on one host; 0: there is none."""
    disk_kv_blocks: int = 0
    """Of the store on the disk of that host; 0: there is none."""
    has_adapters: bool = False
    """Workers of the first model serve LoRA adapters."""
    instance_wait_s: float = 30.0
    """For how long requests wait for an instance; nothing is away for longer than by default, so that nobody is ever
    given up then."""

    @property
    def frontend_ids(self) -> tuple[str, ...]:
        """Names of the frontends."""
        return self._names("frontend", self.frontends)

    @property
    def scheduler_ids(self) -> tuple[str, ...]:
        """Names of the schedulers."""
        return self._names("scheduler", self.schedulers)

    @property
    def monitor_ids(self) -> tuple[str, ...]:
        """Names of the monitors."""
        return self._names("monitor", self.monitors)

    @property
    def router_ids(self) -> tuple[str, ...]:
        """Names of the cascade routers."""
        return self._names("cascade", self.routers)

    @property
    def planner_ids(self) -> tuple[str, ...]:
        """Names of the planners."""
        return self._names("planner", self.planners)

    @property
    def predictor_ids(self) -> tuple[str, ...]:
        """Names of the predictors."""
        return self._names("predictor", self.predictors)

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """Names of the workers of both models."""
        return tuple(name for name, _, _ in self.workers)

    @property
    def workers(self) -> Iterator[tuple[str, str, Phase]]:
        """Name, model and phase of each worker."""
        for index, phase in enumerate(self.phases):
            if not self.supervised:
                yield f"worker-{index}", MODEL, phase
            else:
                prefix = MODEL if phase == "any" else f"{MODEL}-{phase}"
                yield f"{prefix}-{self.phases[:index].count(phase)}", MODEL, phase
        for index in range(self.large):
            yield f"{LARGE}-{index}", LARGE, "any"

    @property
    def models(self) -> tuple[str, ...]:
        """That it serves, without cascades."""
        return (MODEL, LARGE) if self.large else (MODEL,)

    @property
    def control_ids(self) -> tuple[str, ...]:
        """Names of all members but workers and frontends."""
        return (*self.monitor_ids, *self.scheduler_ids, *self.router_ids, *self.planner_ids, *self.predictor_ids)

    @property
    def member_ids(self) -> tuple[str, ...]:
        """Names of all members of the mesh, in the order in which they are started."""
        return (*self.control_ids, *self.worker_ids, *self.frontend_ids)

    def _names(self, role: str, count: int) -> tuple[str, ...]:
        if self.supervised and count == 1:
            return (role,)
        return tuple(f"{role}-{index}" for index in range(count))


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
    """How long it does not read, or stays away. One that returns also does so if its connection breaks. One that polls
    asks for a chat as a response in the background, and leaves a stream for good after `after_s`."""


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


class BreakEngine(msgspec.Struct, frozen=True, tag=True):
    """The engine of a worker raises where it is to run a request that has moved to it."""

    at_s: float
    name: str
    for_s: float


class ChangeBlocks(msgspec.Struct, frozen=True, tag=True):
    """A byte changes in some of the blocks that the host holds, in memory and on disk."""

    at_s: float
    share: float
    seed: int


class FullHostDisk(msgspec.Struct, frozen=True, tag=True):
    """The disk on which the host keeps KV is full."""

    at_s: float
    for_s: float


class KillInWrite(msgspec.Struct, frozen=True, tag=True):
    """From then on, whoever first writes a block to that disk is killed in the midst of it, and started again after
    `for_s`."""

    at_s: float
    for_s: float


class LosePower(msgspec.Struct, frozen=True, tag=True):
    """Of the host: all workers are killed and started again after `for_s`, the KV in its memory is gone, and what its
    disk had not written yet is lost in part."""

    at_s: float
    for_s: float


Fault: TypeAlias = (
    Kill
    | Terminate
    | Pause
    | Cut
    | Slow
    | Compact
    | Wipe
    | DeleteKeys
    | FullDisk
    | StepClock
    | BreakEngine
    | ChangeBlocks
    | FullHostDisk
    | KillInWrite
    | LosePower
)


class Operation(msgspec.Struct, frozen=True):
    """Something that an operator does."""

    at_s: float
    action: OperatorAction


class Timeline(msgspec.Struct, frozen=True):
    """One simulation."""

    seed: int
    """Decides what the timeline leaves open: latencies, the chance that the roles take, torn writes. Each machine and
    each link draws for itself, so what is left out of a timeline disturbs the rest as little as possible."""
    topology: Topology
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]
    operations: tuple[Operation, ...] = ()

    def to_json(self) -> str:
        """What `read_timeline` reads."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode() + "\n"


def read_timeline(content: bytes | str) -> Timeline:
    """Raises msgspec.ValidationError for what is no timeline."""
    return msgspec.json.decode(content, type=Timeline)
