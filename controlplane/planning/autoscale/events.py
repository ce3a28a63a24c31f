"""What the `AutoscaleManager` is told, and what it says."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from controlplane.model.autoscale_record import AutoscalePolicy
from controlplane.model.replica_kind import KindReplicas
from controlplane.planning.autoscale.capacity import CapacityCurve
from controlplane.planning.autoscale.history import AutoscaleHistory
from controlplane.planning.autoscale.status import AutoscaleStatus


@dataclass(frozen=True, slots=True)
class PolicySet:
    """Scale this model so from now on; None: no more, its replicas stay as they are."""

    model: str
    policy: AutoscalePolicy | None


@dataclass(frozen=True, slots=True)
class CapacityKnown:
    """What a replica sustains by its profile."""

    model: str
    curve: CapacityCurve | None
    """None: that is not known."""
    by: str = ""
    """The profile, or why it is not known."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """The state store says that the model is to have so many: another leader's decision, or one's own, heard again."""

    model: str
    replicas: int | None
    """None: nobody has decided yet."""
    kinds: tuple[KindReplicas, ...] = ()
    """Of which kinds, where the policy names some."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What came and ended since the last such event, and what waits now."""

    model: str
    arrivals: int
    ended: int = 0
    kept: int = 0
    """Of those that ended: within the SLO."""
    waiting: int = 0
    """Requests that no replica works on yet, at the door or in queues of instances."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The model's instances that serve, and how many requests are under way on each."""

    model: str
    running: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Refused:
    """The actuator cannot give what is wanted; "": it can again."""

    model: str
    why: str


@dataclass(frozen=True, slots=True)
class Led:
    """Whether this manager decides for the mesh. One that does not keeps its observations."""

    is_leading: bool


@dataclass(frozen=True, slots=True)
class Recalled:
    """What a leader kept of the model so long ago; a manager that has observed it itself knows better."""

    history: AutoscaleHistory
    age_s: float

    @property
    def model(self) -> str:
        return self.history.model


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Leave:
    """This manager ends: what it remembers is kept for the next."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Have so many replicas of the model, from now on."""

    model: str
    replicas: int
    leave_first: tuple[str, ...]
    """The least loaded first, where some are to go."""
    why: str
    kinds: tuple[KindReplicas, ...] = ()
    """Of which kinds, where the policy names some."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Show this to operators."""

    status: AutoscaleStatus


@dataclass(frozen=True, slots=True)
class Keep:
    """Write this to the state store; a failure loses no more than what has come since the last one."""

    history: AutoscaleHistory


AutoscaleEvent: TypeAlias = (
    PolicySet | CapacityKnown | Adopted | Observed | Seen | Refused | Led | Recalled | Tick | Leave
)
AutoscaleInstruction: TypeAlias = Scale | Publish | Keep
