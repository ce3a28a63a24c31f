"""How many replicas each model is to have: observed load in, numbers of replicas out (pure).

A model is scaled for the highest rate that is to be expected until a replica ordered now would serve: capacity is
there for the upper end of the forecast, not for the rate of a moment ago. Up at once, down once nothing in `settle_s`
would have needed the replica. The manager says how many and who goes first; `controlplane.deployment` decides what is
started and drained for it, together with the plans of cascades.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, exp
from typing import Final

from controlplane.model.autoscale_record import AutoscalePolicy
from controlplane.planning.autoscale.capacity import ReplicaCapacity, SeenCapacity, replicas_for
from controlplane.planning.autoscale.events import (
    Adopted,
    AutoscaleEvent,
    AutoscaleInstruction,
    CapacityKnown,
    Keep,
    Leave,
    Led,
    Observed,
    PolicySet,
    Publish,
    Recalled,
    Refused,
    Scale,
    Seen,
    Tick,
)
from controlplane.planning.autoscale.forecast import KEPT_BUCKETS, Forecast, RateForecaster
from controlplane.planning.autoscale.history import (
    HISTORIES_BYTES,
    RATE_BYTES,
    AutoscaleHistory,
    packed_rates,
)
from controlplane.planning.autoscale.mix import Bounds, Mix, next_mix, standing_mix
from controlplane.planning.autoscale.status import AutoscaleStatus
from mesh.invariants import invariants

DEFAULT_COLD_START_S: Final = 120.0
"""Until one was measured."""
AIM: Final = 0.8
"""Of the requests that may be late, so many are aimed at: a day has days' chance."""
GAIN: Final = 0.5
"""How far the margin moves, relatively, where all requests of an interval are late."""
CERTAIN: Final = 100
"""Fewer ended requests in an interval move it less."""
MARGINS: Final = (0.6, 1.5)
LATE: Final = 1.1
"""Where requests wait and are late, so much of what the replicas are said to sustain is held at the least."""
TRICKLE_PER_S: Final = 1e-6
"""A load that needs a replica, and no more than one."""
KEEP_S: Final = 300.0
"""Between two writings of what is remembered: a planner that is killed loses so much at the most."""
MAX_COLD_START_S: Final = 3600.0
"""A replica that takes longer has failed, which says nothing of those that do not."""


NO_MIX: Final = Mix((), ())


@dataclass(slots=True)
class _Model:
    policy: AutoscalePolicy
    forecaster: RateForecaster
    since_s: float
    """When the present interval began."""
    last_arrival_s: float
    kept_s: float
    """When what is remembered was written last."""
    wanted: int | None = None
    """None: nobody has decided yet."""
    mix: Mix = NO_MIX
    """What is wanted, where the policy names kinds."""
    capacity: ReplicaCapacity = field(default_factory=ReplicaCapacity)
    running: Mapping[str, int] = field(default_factory=dict)
    arrivals: int = 0
    ended: int = 0
    kept: int = 0
    waiting: int = 0
    is_heard: bool = False
    """Whether anybody reported in this interval."""
    needs: deque[tuple[float, float]] = field(default_factory=deque)
    """When how many replicas were needed, or requests/s that are to be held where the policy names kinds; falling:
    each is higher than all that came after it."""
    ordered_s: float | None = None
    """When more were ordered that do not all serve yet."""
    ordered_from: int = 0
    measured_cold_start_s: float | None = None
    margin: float = 1.0
    """What the forecast is multiplied by, so that as many requests are late as may be, and no fewer."""
    refused: str = ""
    status: AutoscaleStatus | None = None

    @property
    def cold_start_s(self) -> float:
        return self.policy.cold_start_s or self.measured_cold_start_s or DEFAULT_COLD_START_S

    @property
    def capacity_per_s(self) -> float:
        if self.policy.kinds:
            return self.mix.capacity_per_s / max(1, self.mix.replicas)
        return self.capacity.per_s(self.policy.capacity_per_s, self.policy.share)


class AutoscaleManager:
    """Of all models with a policy. Feed every event to `handle` and carry out what comes back, in order.

    Times are seconds on the holder's clock, which never goes back. Only one that leads says `Scale`, so that a leader
    that lost its lease says nothing, and one that comes after begins with what stands in the state store.
    """

    def __init__(self) -> None:
        self._models: dict[str, _Model] = {}
        self._is_leading = False

    @property
    def models(self) -> frozenset[str]:
        """Those with a policy."""
        return frozenset(self._models)

    def status(self, model: str) -> AutoscaleStatus | None:
        """As last decided; None before."""
        found = self._models.get(model)
        return None if found is None else found.status

    def handle(self, event: AutoscaleEvent, now_s: float) -> tuple[AutoscaleInstruction, ...]:
        """Take in an event; returns what is to be done about it. Events of models without a policy change nothing."""
        match event:
            case PolicySet(model, policy):
                self._set(model, policy, now_s)
                return ()
            case Led(is_leading):
                self._is_leading = is_leading
                return ()
            case Tick():
                return tuple(each for model in self._models.values() for each in self._tick(model, now_s))
            case Leave():
                models = self._models.values() if self._is_leading else ()
                return tuple(self._keep(model, now_s) for model in models if model.forecaster.buckets)
        found = self._models.get(event.model)
        if found is None:
            return ()
        match event:
            case CapacityKnown(_, curve, by):
                found.capacity.learn(curve, by, found.policy.share)
            case Adopted(_, replicas, kinds):
                found.wanted, found.mix = replicas, standing_mix(found.policy.kinds, kinds)
                if found.status is None:
                    _settle_standing(found, now_s)
            case Recalled(history, age_s):
                self._recall(found, history, age_s, now_s)
            case Refused(_, why):
                found.refused = why
            case Seen(_, running):
                self._see(found, running, now_s)
            case Observed():
                return self._observe(found, event, now_s)
        return ()

    @invariants
    def validate(self) -> None:
        """Check what must hold between two events. Raises `InvariantBroken`."""
        for model in self._models.values():
            model.forecaster.validate()
            model.capacity.seen.validate()
            needs = [need for _, need in model.needs]
            assert needs == sorted(needs, reverse=True), "needs that a later one exceeds are forgotten"
            assert model.wanted is None or model.wanted >= 0
            assert 0 <= model.kept <= model.ended

    # -- events

    def _set(self, name: str, policy: AutoscalePolicy | None, now_s: float) -> None:
        if policy is None:
            self._models.pop(name, None)
            return
        former = self._models.get(name)
        if former is not None and former.policy.kinds != policy.kinds:
            former.mix = standing_mix(policy.kinds, former.mix.by_kind)
            former.needs.clear()
        if former is not None and _looks_ahead(former.policy, former) == _looks_ahead(policy, former):
            former.policy = policy
            former.needs.clear()
            return
        forecaster = RateForecaster(policy.interval_s, _looks_ahead(policy, former))
        kept = former is not None and former.policy.interval_s == policy.interval_s
        if former is not None and kept:
            forecaster.recall(former.forecaster.rates)
        fresh = _Model(policy, forecaster, now_s, now_s, now_s)
        if former is not None:
            fresh.wanted, fresh.capacity, fresh.running = former.wanted, former.capacity, former.running
            fresh.mix = former.mix
            fresh.last_arrival_s, fresh.measured_cold_start_s = former.last_arrival_s, former.measured_cold_start_s
            fresh.margin = former.margin
        self._models[name] = fresh

    @staticmethod
    def _recall(model: _Model, history: AutoscaleHistory, age_s: float, now_s: float) -> None:
        if model.forecaster.buckets:
            return
        if history.cold_start_s is not None:
            model.measured_cold_start_s = history.cold_start_s
        if history.interval_s == model.policy.interval_s:
            model.forecaster = RateForecaster(history.interval_s, _looks_ahead(model.policy, model))
            model.forecaster.recall(history.rates_per_s)
            model.forecaster.skip(int(max(0.0, age_s) / history.interval_s))
        model.margin = min(max(history.margin, MARGINS[0]), MARGINS[1])
        model.capacity.seen = SeenCapacity(history.kept_per_s, history.broken_per_s)
        model.last_arrival_s = now_s - history.idle_s  # who came while nobody observed is not known
        needs = [(now_s - age_s - needed_s, need) for needed_s, need in history.needs]
        model.needs = deque(each for each in needs if each[0] >= now_s - model.policy.settle_s)
        _settle_standing(model, now_s)

    def _keep(self, model: _Model, now_s: float) -> Keep:
        model.kept_s = now_s
        room = HISTORIES_BYTES // (RATE_BYTES * len(self._models))
        return Keep(
            AutoscaleHistory(
                model.policy.model,
                model.policy.interval_s,
                packed_rates(model.forecaster.rates[-room:]),
                model.margin,
                model.capacity.seen.kept_per_s,
                model.capacity.seen.broken_per_s,
                max(0.0, now_s - model.last_arrival_s),
                tuple((now_s - at_s, need) for at_s, need in model.needs),
                model.measured_cold_start_s,
            )
        )

    def _see(self, model: _Model, running: Mapping[str, int], now_s: float) -> None:
        model.running = dict(running)
        if model.ordered_s is None:
            return
        took_s = now_s - model.ordered_s
        if len(running) >= (model.wanted or 0):
            if len(running) > model.ordered_from:
                model.measured_cold_start_s = max(took_s, model.policy.interval_s / 60)
            model.ordered_s = None
        elif took_s > MAX_COLD_START_S:
            model.ordered_s = None

    def _observe(self, model: _Model, seen: Observed, now_s: float) -> tuple[AutoscaleInstruction, ...]:
        model.is_heard = True
        model.arrivals += seen.arrivals
        model.ended += seen.ended
        model.kept += min(seen.kept, seen.ended)
        model.waiting = seen.waiting
        if seen.arrivals or seen.waiting:
            model.last_arrival_s = now_s
        if model.wanted == 0 and (seen.waiting or seen.arrivals):
            why = "a request waits at the door"
            to_have: tuple[Mix | int, str] = (max(1, model.policy.minimum), why)
            if model.policy.kinds:
                to_have = self._mixed(model, TRICKLE_PER_S, why)
            return self._want(model, *to_have, None, now_s)
        return ()

    def _tick(self, model: _Model, now_s: float) -> tuple[AutoscaleInstruction, ...]:
        elapsed_s = now_s - model.since_s
        if elapsed_s < model.policy.interval_s * (1 - 1e-9):
            return ()
        model.since_s = now_s
        if not model.is_heard:
            if model.forecaster.buckets:
                self._add(model, model.forecaster.last_per_s, elapsed_s)
            return self._show(model, "nobody reports how many requests come: nothing is changed", None, 0.0, None)
        rate = model.arrivals / elapsed_s
        self._add(model, rate, elapsed_s)
        kept_share = model.kept / model.ended if model.ended else None
        if model.running and kept_share is not None:
            model.capacity.seen.saw(rate / len(model.running), kept_share >= model.policy.share)
        self._learn(model)
        model.arrivals = model.ended = model.kept = 0
        model.is_heard = False
        forecast = model.forecaster.forecast(model.policy.quantile)
        need, why = self._need(model, forecast, kept_share, now_s)
        settled = self._settled(model, need, now_s)
        if settled > need:
            why = f"{why}; {need:.3g} would do, kept for {model.policy.settle_s:g} s"
        wanted, why = self._mixed(model, settled, why) if model.policy.kinds else self._bounded(model, settled, why)
        decided = self._want(model, wanted, why, (rate, forecast, kept_share), now_s)
        is_due = self._is_leading and now_s - model.kept_s >= KEEP_S
        return (*decided, self._keep(model, now_s)) if is_due else decided

    # -- decisions

    @staticmethod
    def _add(model: _Model, rate_per_s: float, elapsed_s: float) -> None:
        for _ in range(min(KEPT_BUCKETS, max(1, round(elapsed_s / model.policy.interval_s)))):
            model.forecaster.add(rate_per_s)

    @staticmethod
    def _learn(model: _Model) -> None:
        """Move the margin by how many were late against how many may be: on average they come to be equal, whatever is
        wrong with forecasts and capacities (Gibbs and Candes, "Adaptive conformal inference under distribution shift",
        2021, equation 2, for the level of capacity instead of a quantile)."""
        if not model.ended:
            return
        late, allowed = 1 - model.kept / model.ended, AIM * (1 - model.policy.share)
        moved = model.margin * exp(GAIN * min(1.0, model.ended / CERTAIN) * (late - allowed))
        model.margin = min(max(moved, MARGINS[0]), MARGINS[1])

    def _need(self, model: _Model, forecast: Forecast, kept_share: float | None, now_s: float) -> tuple[float, str]:
        """Replicas by the forecast, or the load where the policy names kinds, and why; not yet settled, not yet within
        the policy's bounds."""
        policy, serving = model.policy, len(model.running)
        idle_s = now_s - model.last_arrival_s
        comes_soon = forecast.expected_per_s * policy.interval_s >= 1
        if idle_s >= policy.idle_s and not model.waiting and not any(model.running.values()) and not comes_soon:
            return 0, f"no request for {idle_s:.0f} s"
        rate = forecast.upper_per_s * model.margin + model.waiting / policy.interval_s
        is_late = kept_share is not None and kept_share < policy.share and model.waiting > serving
        late = f", but {100 * (1 - (kept_share or 0)):.1f} % of requests miss the SLO" if is_late else ""
        if policy.kinds:
            at_least = model.mix.capacity_per_s * LATE if is_late and model.ordered_s is None else 0.0
            return max(rate, at_least, TRICKLE_PER_S), f"up to {rate:.3g} requests/s are to be expected{late}"
        capacity = model.capacity_per_s
        if capacity <= 0:
            more = 1 if model.waiting else 0
            return max(1, serving + more), "what a replica sustains is not known yet"
        need = max(1, replicas_for(rate, capacity))
        said = f"up to {rate:.3g} requests/s are to be expected, a replica sustains {capacity:.3g}, "
        said += model.capacity.source(policy.capacity_per_s)
        if is_late and need <= serving and model.ordered_s is None:
            return serving + 1, f"{said}{late}"
        return need, said

    @staticmethod
    def _settled(model: _Model, need: float, now_s: float) -> float:
        """The most that was needed within `settle_s`."""
        _note_need(model, need, now_s)
        while model.needs[0][0] < now_s - model.policy.settle_s:
            model.needs.popleft()
        return model.needs[0][1]

    @staticmethod
    def _bounded(model: _Model, settled: float, why: str) -> tuple[Mix | int, str]:
        """So many replicas, within the policy's bounds."""
        policy, wanted = model.policy, int(settled)
        bounded = min(max(wanted, policy.minimum), policy.most)
        if bounded != wanted:
            bound = "the budget" if policy.most < min(wanted, policy.maximum) else "the bounds"
            why = f"{why}; {bound} of the policy: {bounded} instead of {wanted}"
        return bounded, why

    @staticmethod
    def _mixed(model: _Model, load_per_s: float, why: str) -> tuple[Mix | int, str]:
        """The cheapest replicas that hold the load, within the policy's bounds."""
        policy = model.policy
        bounds = Bounds(policy.minimum, policy.maximum, policy.budget_per_hour)
        standing, is_under_way = standing_mix(policy.kinds, model.mix.by_kind), model.ordered_s is not None
        mix = next_mix(load_per_s, bounds, standing, model.cold_start_s, is_under_way)
        why = f"{why}; {mix} sustain {mix.capacity_per_s:.3g} for {mix.cost_per_hour:.4g} an hour"
        if mix.capacity_per_s < load_per_s * (1 - 1e-5):
            why = f"{why}, the most within the policy's bounds, of {load_per_s:.3g}"
        return mix, why if mix.is_proven else f"{why} (found in time; others may be a little cheaper)"

    def _want(
        self,
        model: _Model,
        to_have: Mix | int,
        why: str,
        known: tuple[float, Forecast, float | None] | None,
        now_s: float,
    ) -> tuple[AutoscaleInstruction, ...]:
        former = model.wanted if model.wanted is not None else len(model.running)
        rate, forecast, kept_share = known or (0.0, None, None)
        mix = to_have if isinstance(to_have, Mix) else NO_MIX
        wanted = to_have.replicas if isinstance(to_have, Mix) else to_have
        is_mixed_anew = mix.by_kind != model.mix.by_kind
        is_other = wanted != former or model.wanted is None or is_mixed_anew
        if not self._is_leading or not is_other:
            return self._show(model, why, forecast, rate, kept_share, wanted, mix)
        leave_first: tuple[str, ...] = ()
        if wanted < len(model.running) or is_mixed_anew:
            leave_first = tuple(sorted(model.running, key=lambda name: (model.running[name], name)))
        if not model.policy.dry_run:
            if wanted > max(former, len(model.running)):
                model.ordered_s, model.ordered_from = now_s, len(model.running)
            elif wanted < former:
                model.ordered_s = None
            model.wanted, model.mix = wanted, mix
        shown = self._show(model, why, forecast, rate, kept_share, wanted, mix)
        scale = Scale(model.policy.model, wanted, leave_first, why, mix.by_kind)
        return shown if model.policy.dry_run else (scale, *shown)

    def _show(
        self,
        model: _Model,
        why: str,
        forecast: Forecast | None,
        rate_per_s: float,
        kept_share: float | None,
        wanted: int | None = None,
        mix: Mix | None = None,
    ) -> tuple[AutoscaleInstruction, ...]:
        said = forecast or Forecast(0.0, 0.0, "", 0.0)
        mix = mix or model.mix
        model.status = AutoscaleStatus(
            model.policy.model,
            (model.wanted if wanted is None else wanted) or 0,
            len(model.running),
            rate_per_s,
            said.expected_per_s,
            said.upper_per_s,
            said.predictor,
            said.relative_error,
            model.capacity_per_s,
            model.cold_start_s,
            model.waiting,
            kept_share,
            why,
            model.refused,
            model.policy.dry_run,
            model.forecaster.buckets * model.policy.interval_s,
            mix.by_kind,
            mix.cost_per_hour,
        )
        return (Publish(model.status),)


def _note_need(model: _Model, need: float, at_s: float) -> None:
    while model.needs and model.needs[-1][1] <= need:
        model.needs.pop()
    model.needs.append((at_s, need))


def _settle_standing(model: _Model, now_s: float) -> None:
    """Whoever has decided what stands knew why: what no need explains that is remembered counts as needed just now."""
    stands = model.mix.capacity_per_s if model.policy.kinds else model.wanted
    if stands is not None and (not model.needs or stands > model.needs[0][1]):
        _note_need(model, stands, now_s)


def _looks_ahead(policy: AutoscalePolicy, former: _Model | None) -> int:
    """Intervals until a replica that is ordered now serves, and the decision after that one is due."""
    measured = former.measured_cold_start_s if former is not None else None
    cold_start_s = policy.cold_start_s or measured or DEFAULT_COLD_START_S
    return ceil(cold_start_s / policy.interval_s) + 1
