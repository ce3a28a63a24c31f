"""What rescheduler, monitors and coordinators are to a simulation: objects that watch it and order migrations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from controlplane.model.instance import InstanceDescription, LoadReport
from controlplane.model.migration_order import MigrationOrder
from controlplane.model.placement import Placement
from controlplane.model.running_request import RunningRequest
from controlplane.model.snapshot import Snapshot
from simulator.cluster.config import InstanceSpec
from simulator.report.outcome import RequestOutcome


@dataclass(frozen=True, slots=True)
class Placed:
    """A request was given to an instance: a new one, or one that has lost its instance."""

    request_id: str
    instance_id: str
    decode_instance_id: str
    """Where it is to be decoded; the same instance unless it moves after its first token."""
    prompt_tokens: int
    placement: Placement | None = field(default=None, compare=False, repr=False)
    """The reasons; an event that a test makes up has none."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A request's first token is out."""

    request_id: str
    instance_id: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A request has all its tokens, or failed."""

    request_id: str
    instance_id: str
    """Where it was last; empty: nowhere."""
    error: str = ""
    outcome: RequestOutcome | None = field(default=None, compare=False, repr=False)
    """An event that a test makes up has none."""


@dataclass(frozen=True, slots=True)
class Preempted:
    """Memory ran out: a request lost its KV and waits to be computed again."""

    request_id: str
    instance_id: str


@dataclass(frozen=True, slots=True)
class Joined:
    """A new instance, or a new incarnation of one."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class Lost:
    """An instance has died; its requests are being placed anew."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class MigrationEnd:
    """An order to move a request has ended."""

    order: MigrationOrder
    moved: bool
    reason: str
    """Why it did not; empty where it did."""
    ordered_ms: float
    ended_ms: float
    refused: bool = False
    """The target would not take it now; it may later."""
    rounds: int = 0
    blocks: int = 0
    """Of the request's KV, whether copied or found in the target's prefix cache; 0 unless it moved."""
    paused_ms: float = 0.0
    """How long the request stood still at its source."""


ClusterEvent: TypeAlias = Placed | FirstToken | Ended | Preempted | Joined | Lost | MigrationEnd


class Cluster(Protocol):
    """What a controller sees and may do. Instance ids are in the order of joining.

    `snapshot` is what reports have told the scheduler, as stale as theirs; everything else is the state at this very
    moment, as an instance itself knows it: what a controller uses of another instance it must let travel with `after`.
    """

    @property
    def model(self) -> str:
        """The name of the cluster's only model."""

    @property
    def now_ms(self) -> float:
        """Simulated time since the start, in milliseconds."""

    @property
    def message_delay_ms(self) -> float:
        """Of a message between two instances."""

    def instance_ids(self) -> tuple[str, ...]:
        """The ids of all instances that are alive."""

    def description(self, instance_id: str) -> InstanceDescription:
        """Facts about an instance. Raises KeyError for one that is not alive, as all of these do."""

    def spec(self, instance_id: str) -> InstanceSpec:
        """How the instance is modelled."""

    def snapshot(self) -> Snapshot | None:
        """The cluster as the scheduler knows it; None before any instance has joined."""

    def load(self, instance_id: str) -> LoadReport:
        """The instance's load at this very moment."""

    def cached_blocks(self) -> dict[str, int]:
        """KV blocks in the prefix cache of each instance, as the scheduler knows it."""

    def running(self, instance_id: str) -> list[RunningRequest]:
        """The requests that decode there, without predictions, in no particular order but always the same one."""

    def prompt_tokens(self, request_id: str) -> int:
        """Of an open request. Raises KeyError for one that has ended."""

    def moves(self, request_id: str) -> bool:
        """Whether a migration of the request waits or is under way."""

    def oracle_remaining_tokens(self, request_id: str) -> int:
        """Tokens that an open request will really generate from now on. Nobody can know this in the live mesh: for
        upper bounds, and for predictors that add an error of their own."""

    def order(self, order: MigrationOrder) -> None:
        """Have a request moved; how that ended comes as a `MigrationEnd`."""

    def after(self, delay_ms: float, act: Callable[[float], None]) -> None:
        """Call `act` with the time, so many milliseconds from now: a timer, or a message that takes so long. What has
        not happened when the last request ends never will."""


class Controller(Protocol):
    """Attached to a simulation before it starts; deterministic, with no clock of its own."""

    @property
    def interval_ms(self) -> float | None:
        """How often `act` is called; None: never."""

    def attached(self, cluster: Cluster) -> None:
        """Once, with all instances there at the start joined."""

    def act(self, cluster: Cluster, now_ms: float) -> Sequence[MigrationOrder]:
        """Called every `interval_ms`; the orders are carried out as if by `Cluster.order`."""

    def on_event(self, event: ClusterEvent, now_ms: float) -> None:
        """Something happened. Whatever is to be done about it goes through the cluster it was attached to."""
