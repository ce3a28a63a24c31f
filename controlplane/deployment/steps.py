"""What to start and end next on the way to the planned replicas (pure).

Tiers that get smaller shrink at once. A tier whose replicas change shape gets a substitute first, and gives up its old
replicas when the others that serve have as many GPUs as planned. Where the GPUs do not suffice for both, and nothing is
under way that could change that, one replica is ended first: the last one of its tier only for a substitute of that
very tier that then fits. A substitute that failed too often is not tried at that price again. A tier that has nothing
left because its substitute failed is served by a stand-in in its former shape.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from controlplane.deployment.replicas import Replica, ReplicaState, Shape
from controlplane.deployment.tier_status import TierStatus, tier_statuses

TierShape = tuple[str, Shape]


@dataclass(frozen=True, slots=True)
class Situation:
    """All that the next steps depend on."""

    replicas: tuple[Replica, ...]
    """In the order in which they were started."""
    wanted: Mapping[str, Mapping[Shape, int]]
    free: int
    """GPUs that no instance holds, or places for instances where there are no GPUs."""
    room_of: Callable[[Shape], int]
    """How much of that an instance takes."""
    failed: frozenset[TierShape] = frozenset()
    """Did not come to serve, and nothing has served their tier since."""
    held: frozenset[TierShape] = frozenset()
    """Failed a short time ago: not to be started now."""
    spent: frozenset[TierShape] = frozenset()
    """Failed so often that no serving instance is ended for them any more."""
    former: Mapping[str, Shape] = field(default_factory=dict)
    """What last served each model."""
    lingering: frozenset[str] = frozenset()
    """Models that the plan has just left out: requests that came before may still ask for them."""
    leave_first: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By model: the instances that are to go first, where some have to."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start another instance of a model, in this shape."""

    model: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class End:
    """Drain an instance and end its process."""

    name: str


Step = Start | End


def next_steps(now: Situation) -> tuple[Step, ...]:
    """All that can be begun at once; empty: the plan is reached, or something under way or held has to be awaited."""
    tiers = tier_statuses(now.replicas, now.wanted, now.leave_first)
    bridges = _bridges(now, tiers)
    ends = [
        End(each.name)
        for tier in tiers
        for each in (*tier.failed, *tier.covered(lingers=bridges or tier.model in now.lingering))
    ]
    starts = _Starts(now, tiers).choose()
    if ends or starts or any(tier.is_under_way or _lingers(tier, now) for tier in tiers):
        return (*ends, *starts)
    return _exchange(now, tiers)


class _Starts:
    """Takes as many of the missing as fit, those first that spare a tier from being without an instance."""

    def __init__(self, now: Situation, tiers: tuple[TierStatus, ...]) -> None:
        self._now = now
        self._tiers = tiers
        self._free = now.free
        self._chosen: list[Start] = []

    def choose(self) -> tuple[Start, ...]:
        """In the order in which they are to be started."""
        if self._substitutes_wait():
            return tuple(self._chosen)
        stood_in = {tier.model for tier in self._tiers if self._stand_in(tier)}
        others = [tier for tier in self._tiers if tier.model not in stood_in]
        for tier in others:
            if not tier.is_live:
                self._take(tier, only_one=True)
        for tier in others:
            self._take(tier)
        return tuple(self._chosen)

    def _substitutes_wait(self) -> bool:
        """Start one substitute for each tier that has none on its way, those first that give back more than they take.

        True where one does not fit yet: others would take the GPUs that it waits for, and the tier would have to be
        without an instance. But nothing waits where the wait may have no end.
        """
        waits = False
        for tier in sorted((tier for tier in self._tiers if tier.is_at_risk), key=self._takes_more):
            took = self._take(tier, only_one=True)
            waits = waits or (not took and any(_may_cost(tier, self._now)))
        return waits and not self._now.held and not self._now.spent and self._all_fits()

    def _all_fits(self) -> bool:
        wanted = sum(self._now.room_of(shape) * n for tier in self._tiers for shape, n in tier.wanted.items())
        taken = sum(self._now.room_of(each.shape) for tier in self._tiers for each in tier.replicas)
        return wanted <= taken + self._now.free

    def _takes_more(self, tier: TierStatus) -> tuple[bool, int]:
        takes = min(self._now.room_of(shape) for shape in tier.missing)
        gives = sum(self._now.room_of(each.shape) for each in tier.surplus)
        return takes > gives, takes

    def _take(self, tier: TierStatus, *, only_one: bool = False) -> bool:
        """Start what fits of the missing; narrow ones first, since more of them fit. Whether any does."""
        begun = Counter(start.shape for start in self._chosen if start.model == tier.model)
        took = False
        for shape in sorted((tier.missing - begun).elements(), key=self._now.room_of):
            fits = self._now.room_of(shape) <= self._free
            if fits and (tier.model, shape) not in self._now.held and not (took and only_one):
                self._start(tier.model, shape)
                took = True
        return took

    def _stand_in(self, tier: TierStatus) -> bool:
        """Start one in the former shape, where the tier has nothing and all that is planned for it has failed."""
        former = self._now.former.get(tier.model)
        if former is None or former in tier.wanted or tier.is_live or not tier.missing:
            return False
        hopeless = all((tier.model, shape) in self._now.failed for shape in tier.missing)
        if not hopeless or (tier.model, former) in self._now.failed or self._now.room_of(former) > self._free:
            return False
        self._start(tier.model, former)
        return True

    def _start(self, model: str, shape: Shape) -> None:
        self._free -= self._now.room_of(shape)
        self._chosen.append(Start(model, shape))


def _may_cost(tier: TierStatus, now: Situation) -> Iterator[Shape]:
    """Missing shapes for which a serving instance may be ended."""
    return (shape for shape in tier.missing if (tier.model, shape) not in now.held | now.spent)


def _bridges(now: Situation, tiers: tuple[TierStatus, ...]) -> bool:
    """Whether tiers that are left out go on serving for one that nobody serves yet, whose requests may come to them.
    Not where GPUs are needed."""
    unserved = any(tier.wanted and not tier.serving for tier in tiers)
    going = (ReplicaState.FAILED, ReplicaState.ENDING)
    free_soon = now.free + sum(
        now.room_of(each.shape) for tier in tiers for each in tier.replicas if each.state in going
    )
    return unserved and all(now.room_of(shape) <= free_soon for tier in tiers for shape in tier.missing)


def _lingers(tier: TierStatus, now: Situation) -> bool:
    return tier.model in now.lingering and bool(tier.serving)


def _exchange(now: Situation, tiers: tuple[TierStatus, ...]) -> tuple[Step, ...]:
    """End one first, where nothing else leads on: one that leaves others serving its tier, else the last of a tier
    that has a substitute which then fits."""
    in_reach = now.free + sum(now.room_of(each.shape) for tier in tiers for each in tier.surplus)
    waiting = [shape for tier in tiers for shape in _may_cost(tier, now) if now.room_of(shape) <= in_reach]
    if not waiting:
        return ()
    spare = [tier for tier in tiers if tier.surplus and len(tier.serving) > 1]
    if spare:
        widest = max(spare, key=lambda tier: sum(now.room_of(each.shape) for each in tier.serving))
        return (End(widest.surplus[-1].name),)
    for tier in tiers:
        for last in tier.surplus:
            if any(now.room_of(shape) <= now.free + now.room_of(last.shape) for shape in _may_cost(tier, now)):
                return (End(last.name),)
    return ()
