"""What of a tier's instances stays, goes and is missing, by the plan (pure)."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from controlplane.deployment.replicas import Replica, ReplicaState, Shape, gpus_of


@dataclass(frozen=True)
class TierStatus:
    """One model's instances against the replicas that are wanted of it."""

    model: str
    wanted: Mapping[Shape, int]
    replicas: tuple[Replica, ...]
    """In the order in which they were started."""
    leave_first: tuple[str, ...] = ()
    """Names, in the order in which they are to go where some have to; others stay before any of these."""

    @cached_property
    def kept(self) -> tuple[Replica, ...]:
        """Those whose shape is wanted, as many as are wanted: serving ones before others, older before younger."""
        open_places = Counter(self.wanted)
        kept: list[Replica] = []
        for replica in (*self._by_worth, *self._in(ReplicaState.STARTING)):
            if open_places[replica.shape] > 0:
                open_places[replica.shape] -= 1
                kept.append(replica)
        return tuple(kept)

    @cached_property
    def surplus(self) -> tuple[Replica, ...]:
        """Those that serve or start and are to go, the oldest first."""
        names = {replica.name for replica in self.kept}
        return tuple(
            replica for replica in (*self.serving, *self._in(ReplicaState.STARTING)) if replica.name not in names
        )

    @cached_property
    def missing(self) -> Counter[Shape]:
        """Wanted, and neither serving nor starting."""
        return Counter(self.wanted) - Counter(replica.shape for replica in self.kept)

    @cached_property
    def serving(self) -> tuple[Replica, ...]:
        """Those that requests can be placed on."""
        return self._in(ReplicaState.SERVING)

    @property
    def _by_worth(self) -> tuple[Replica, ...]:
        """Those that serve, who stays longest first."""
        rank = {name: place for place, name in enumerate(self.leave_first)}
        return tuple(sorted(self.serving, key=lambda replica: -rank.get(replica.name, len(rank))))

    @cached_property
    def failed(self) -> tuple[Replica, ...]:
        """Those that hold GPUs for nothing."""
        return self._in(ReplicaState.FAILED)

    @property
    def is_live(self) -> bool:
        """Whether anything serves or may soon."""
        return bool(self.kept or self.surplus)

    @property
    def is_at_risk(self) -> bool:
        """Whether it is served by such alone as are to go, while nothing that is to stay is on its way."""
        return bool(self.serving) and not self.kept and bool(self.missing)

    @property
    def is_reached(self) -> bool:
        """Whether exactly what is wanted serves, and nothing else holds GPUs."""
        return not self.missing and len(self.replicas) == len(self.kept) == len(self.serving)

    @property
    def is_under_way(self) -> bool:
        """Whether a process is starting or ending."""
        return any(replica.state in (ReplicaState.STARTING, ReplicaState.ENDING) for replica in self.replicas)

    def covered(self, lingers: bool) -> tuple[Replica, ...]:
        """Those of the surplus that nobody misses: the others that serve have as many GPUs as are wanted.

        A wanted tier keeps one that serves by that, and so does one that `lingers`. Of a tier that nobody serves yet,
        one that is starting stays: it may serve sooner than what replaces it.
        """
        wanted_gpus = sum(gpus_of(shape) * count for shape, count in self.wanted.items())
        serving_gpus = sum(gpus_of(replica.shape) for replica in self.serving)
        left = len(self.serving)
        ended: list[Replica] = []
        for replica in reversed([each for each in self.surplus if each.state is ReplicaState.SERVING]):
            gpus = gpus_of(replica.shape)
            if serving_gpus - gpus >= wanted_gpus and (left > 1 or not lingers):
                serving_gpus, left = serving_gpus - gpus, left - 1
                ended.append(replica)
        hopes = 1 if self.wanted and not self.serving else 0
        idle = [each for each in self.surplus if each.state is ReplicaState.STARTING]
        return (*ended, *idle[hopes:])

    def _in(self, state: ReplicaState) -> tuple[Replica, ...]:
        return tuple(replica for replica in self.replicas if replica.state is state)


def tier_statuses(
    replicas: Iterable[Replica],
    wanted: Mapping[str, Mapping[Shape, int]],
    leave_first: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> tuple[TierStatus, ...]:
    """Of every model that is planned; instances of others are nobody's business."""
    by_model: dict[str, list[Replica]] = {model: [] for model in wanted}
    for replica in replicas:
        if replica.model in by_model:
            by_model[replica.model].append(replica)
    return tuple(
        TierStatus(model, wanted[model], tuple(found), leave_first.get(model, ())) for model, found in by_model.items()
    )
