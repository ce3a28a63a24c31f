"""The events that a recording consists of, one on each line of JSON."""

from typing import TypeAlias

import msgspec
from xxhash import xxh3_64_intdigest

from controlplane.model.cluster_limits import ClusterLimits
from controlplane.model.instance import InstanceDescription, InstanceState, KvBlocks, LoadReport
from controlplane.model.kv_costs import KvCosts
from controlplane.model.placement import PlacementRequest
from controlplane.model.queue_belief import PresentLoad
from controlplane.model.shared_event import SharedEvent
from controlplane.model.snapshot import Column, Snapshot
from controlplane.model.step_costs import StepCosts
from controlplane.policies.stages.layout import StageLayout


class _Event(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    pass


class _TableEvent(_Event, frozen=True, tag=True):
    table: int
    """Each watch of a monitor fills a table of its own; they are counted from 0."""


class Begun(_Event, frozen=True):
    """The first line: the scheduler has started, and knows nothing."""

    limits: ClusterLimits


class Joined(_TableEvent, frozen=True):
    """Calls of the `ClusterTable` method of the same name; so are the next events."""

    instance: InstanceDescription


class Lost(_TableEvent, frozen=True):
    instance_id: str
    incarnation_id: str


class Reported(_TableEvent, frozen=True):
    instance_id: str
    incarnation_id: str
    load: LoadReport
    state: InstanceState
    admitted_request_ids: tuple[str, ...] = ()
    ended_request_ids: tuple[str, ...] = ()


class Staled(_TableEvent, frozen=True):
    instance_id: str
    incarnation_id: str
    stale: bool


class Unmonitored(_TableEvent, frozen=True):
    instance_id: str
    incarnation_id: str


class Adopted(_TableEvent, frozen=True):
    source: int
    """The table that it is taken over from."""
    instance_id: str


class Cached(_TableEvent, frozen=True):
    instance_id: str
    incarnation_id: str
    blocks: KvBlocks


class Costed(_TableEvent, frozen=True):
    instance_id: str
    incarnation_id: str
    costs: StepCosts


class KvCosted(_TableEvent, frozen=True):
    instance_id: str
    incarnation_id: str
    costs: KvCosts


class Ended(_TableEvent, frozen=True):
    request_id: str


class Shared(_TableEvent, frozen=True):
    event: SharedEvent
    now_s: float


class Corrected(_TableEvent, frozen=True):
    instance_id: str
    present: PresentLoad
    now_s: float


class TakenOver(_TableEvent, frozen=True):
    """Placements that the former table counted."""

    former: int


class Forgotten(_TableEvent, frozen=True):
    now_s: float


class PolicySet(_Event, frozen=True):
    """A fresh policy is configured."""

    name: str
    parameters: dict[str, float]


class LayoutSet(_Event, frozen=True):
    """The policy `stages` that is configured places by another layout of the model's instances; None: by none."""

    model: str
    layout: StageLayout | None


class PoolsResumed(_Event, frozen=True):
    """The configured policy goes on with the pools that another scheduler had made."""

    model: str
    pools: dict[str, str]


class FallbackSet(_Event, frozen=True):
    """The fallback policy takes over, or gives way again."""

    is_in_force: bool
    policy: str = "round_robin"
    """The fallback."""


class Observed(_TableEvent, frozen=True):
    """The policy observed each model's instances."""

    now_s: float


class Placed(_TableEvent, frozen=True):
    """A decision; without an instance, the request was refused."""

    request: PlacementRequest
    instance_id: str = ""
    decode_instance_id: str = ""
    is_decode_open: bool = False
    cached_tokens: int = 0
    snapshot_digest: int = 0
    pull_source_id: str = ""
    pull_tokens: int = 0


class DecodePlaced(_TableEvent, frozen=True):
    """Who decodes, decided at the end of a prefill; empty: where it was prefilled."""

    request: PlacementRequest
    prefill_instance_id: str
    instance_id: str = ""
    snapshot_digest: int = 0


Event: TypeAlias = (
    Begun
    | Joined
    | Lost
    | Reported
    | Staled
    | Unmonitored
    | Adopted
    | Cached
    | Costed
    | KvCosted
    | Ended
    | Shared
    | Corrected
    | TakenOver
    | Forgotten
    | PolicySet
    | LayoutSet
    | PoolsResumed
    | FallbackSet
    | Observed
    | Placed
    | DecodePlaced
)
DECODER = msgspec.json.Decoder(Event)


def digest(snapshot: Snapshot | None) -> int:
    """Equal for equal snapshots: the instances and every indicator, but not where they stand in the prefix index."""
    if snapshot is None:
        return 0
    rows = [row for row in range(Column.COUNT) if row != Column.SLOT]
    names = "\n".join(f"{each.instance_id} {each.incarnation_id}" for each in snapshot.instances)
    numbers = (snapshot.table[rows], snapshot.costs, snapshot.kv_costs)
    return xxh3_64_intdigest(names.encode() + b"".join(each.tobytes() for each in numbers))
