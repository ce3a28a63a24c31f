"""When it is to be worked out from a profile what a replica sustains, and for which requests (pure).

A capacity by a profile is there before the load has shown it: the first rise is answered with the right number of
replicas instead of by trial. It rests on the requests that ended lately, and is worked out anew when these, the SLO,
the profile or the instances have changed.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final, TypeAlias

from controlplane.model.autoscale_record import AutoscalePolicy
from controlplane.planning.autoscale.capacity import CapacityCurve
from controlplane.planning.autoscale.events import CapacityKnown
from controlplane.planning.instance_profile import InstanceProfile
from mesh.invariants import invariants

ENOUGH: Final = 100
"""Requests that must have ended before a capacity is worked out."""
KEPT: Final = 2000
"""Of them that are remembered."""
MOVED: Final = 1.3
"""Mean lengths that differ by more than this factor have moved."""
PAUSE_S: Final = 600.0
"""Between two workings out for one model, which take seconds of CPU each."""


@dataclass(frozen=True, slots=True)
class RequestLength:
    """Of one request that was answered."""

    input_tokens: int
    """That had to be computed: those of the prompt which were not cached."""
    output_tokens: int


@dataclass(frozen=True, slots=True)
class CapacityCase:
    """What a capacity is worked out for."""

    policy: AutoscalePolicy
    profile: InstanceProfile
    lengths: tuple[RequestLength, ...]

    @property
    def model(self) -> str:
        return self.policy.model


@dataclass(frozen=True, slots=True)
class Looked:
    """What there is of a model now, and what ended since the last look."""

    policy: AutoscalePolicy
    profile: InstanceProfile | None
    """Of its instances' kind; None: no such was profiled, or none serves."""
    ended: Sequence[RequestLength] = ()

    @property
    def model(self) -> str:
        return self.policy.model


@dataclass(frozen=True, slots=True)
class Made:
    """A case is done."""

    case: CapacityCase
    curve: CapacityCurve | None
    obstacle: str = ""
    """Why there is no curve."""

    @property
    def model(self) -> str:
        return self.case.model


@dataclass(frozen=True, slots=True)
class Removed:
    """The model is scaled no more."""

    model: str


@dataclass(frozen=True, slots=True)
class MakeCapacity:
    """Work this out, and say `Made`; none other is asked for until then."""

    case: CapacityCase


CapacityEvent: TypeAlias = Looked | Made | Removed
CapacityInstruction: TypeAlias = MakeCapacity | CapacityKnown


@dataclass(slots=True)
class _Model:
    lengths: deque[RequestLength] = field(default_factory=lambda: deque(maxlen=KEPT))
    case: CapacityCase | None = None
    """The last one that was asked for."""
    asked_s: float = 0.0


class ProfiledCapacityManager:
    """Of all models with a policy. Feed every event to `handle` and carry out what comes back.

    Times are seconds on the holder's clock, which never goes back. One case is worked out at a time.
    """

    def __init__(self) -> None:
        self._models: dict[str, _Model] = {}
        self._making: CapacityCase | None = None

    def handle(self, event: CapacityEvent, now_s: float) -> tuple[CapacityInstruction, ...]:
        """Take in an event; returns what is to be done about it."""
        match event:
            case Removed(model):
                self._models.pop(model, None)
                return ()
            case Looked():
                return self._look(event, now_s)
            case Made():
                return self._made(event)

    @invariants
    def validate(self) -> None:
        """Check what must hold between two events. Raises `InvariantBroken`."""
        for model in self._models.values():
            assert len(model.lengths) <= KEPT
            assert model.case is None or len(model.case.lengths) >= ENOUGH

    # -- events

    def _look(self, seen: Looked, now_s: float) -> tuple[CapacityInstruction, ...]:
        model = self._models.setdefault(seen.model, _Model())
        model.lengths.extend(seen.ended)
        if seen.profile is None or seen.policy.capacity_per_s is not None:
            # An instance that restarts, or none at the moment, is no reason to forget what the model's profile said.
            return ()
        if self._making is not None or len(model.lengths) < ENOUGH:
            return ()
        if model.case is not None and not _is_another(model.case, seen):
            is_due = now_s - model.asked_s >= PAUSE_S
            if not (is_due and _have_moved(model.case.lengths, model.lengths)):
                return ()
        model.case = self._making = CapacityCase(seen.policy, seen.profile, tuple(model.lengths))
        model.asked_s = now_s
        return (MakeCapacity(model.case),)

    def _made(self, made: Made) -> tuple[CapacityInstruction, ...]:
        if made.case is self._making:
            self._making = None
        model = self._models.get(made.model)
        if model is None or model.case is not made.case:
            return ()
        by = made.case.profile.name
        return (CapacityKnown(made.model, made.curve, by if made.curve is not None else f"{by}: {made.obstacle}"),)


def _is_another(case: CapacityCase, seen: Looked) -> bool:
    """Whether it is for another SLO or another profile."""
    return case.profile != seen.profile or _slo(case.policy) != _slo(seen.policy)


def _slo(policy: AutoscalePolicy) -> tuple[float | None, float | None, float | None, float]:
    return policy.ttft_ms, policy.tpot_ms, policy.e2e_ms, policy.share


def _have_moved(before: Sequence[RequestLength], now: Sequence[RequestLength]) -> bool:
    def means(lengths: Sequence[RequestLength]) -> tuple[float, float]:
        return fmean(each.input_tokens for each in lengths), fmean(each.output_tokens for each in lengths)

    return any(max(one, 1.0) > MOVED * max(two, 1.0) or max(two, 1.0) > MOVED * max(one, 1.0)
               for one, two in zip(means(before), means(now), strict=True))  # fmt: skip
