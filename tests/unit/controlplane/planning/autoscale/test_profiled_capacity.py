"""When a capacity is worked out from a profile, and what for."""

import msgspec
import pytest

from controlplane.model.autoscale_record import AutoscalePolicy
from controlplane.planning.autoscale.capacity import CapacityCurve
from controlplane.planning.autoscale.events import (
    CapacityKnown,
)
from controlplane.planning.autoscale.profiled_capacity import (
    ENOUGH,
    PAUSE_S,
    CapacityCase,
    Looked,
    Made,
    MakeCapacity,
    ProfiledCapacityManager,
    Removed,
    RequestLength,
)
from mesh.errors import PlanInfeasible
from simulator.autoscale.profiled import profiled_curve
from tests.unit.simulator.cascade.instance_profiles import profile_of

POLICY = AutoscalePolicy("m", ttft_ms=500, tpot_ms=60)
PROFILE = profile_of("m", 20.0)
LENGTHS = [RequestLength(200, 60)] * ENOUGH
CURVE = CapacityCurve((1.0, 2.0), (1.0, 0.9))


class Capacities:
    """A manager whose clock a test moves."""

    def __init__(self) -> None:
        self.manager = ProfiledCapacityManager()
        self.now_s = 0.0

    def look(self, lengths: list[RequestLength], policy: AutoscalePolicy = POLICY, profile: object = PROFILE) -> object:
        """The case that is to be worked out, if any."""
        asked = self.manager.handle(Looked(policy, profile, lengths), self.now_s)  # type: ignore[arg-type]
        self.manager.validate()
        return asked[0].case if asked and isinstance(asked[0], MakeCapacity) else None

    def made(self, case: object, curve: CapacityCurve | None = CURVE, obstacle: str = "") -> object:
        assert isinstance(case, CapacityCase)
        told = self.manager.handle(Made(case, curve, obstacle), self.now_s)
        self.manager.validate()
        return told


def test_it_is_worked_out_once_enough_requests_have_ended() -> None:
    capacities = Capacities()
    assert capacities.look(LENGTHS[1:]) is None
    assert capacities.look([], profile=None) is None
    case = capacities.look(LENGTHS[:1])
    assert isinstance(case, CapacityCase)
    assert (case.profile, case.policy, len(case.lengths)) == (PROFILE, POLICY, ENOUGH)
    assert capacities.look(LENGTHS) is None, "one at a time"
    assert capacities.made(case) == (CapacityKnown("m", CURVE, PROFILE.name),)
    capacities.now_s = 10 * PAUSE_S
    assert capacities.look(LENGTHS) is None, "nothing has changed"


def test_it_is_worked_out_anew_for_another_slo_profile_or_load() -> None:
    capacities = Capacities()
    capacities.made(capacities.look(LENGTHS))
    for change in ({"ttft_ms": 400}, {"share": 0.9}):
        other = msgspec.structs.replace(POLICY, **change)
        capacities.made(capacities.look([], policy=other))
    assert capacities.look([], policy=msgspec.structs.replace(other, maximum=3)) is None, (
        "which is no matter of its own"
    )
    faster = profile_of("m", 10.0)
    capacities.made(capacities.look([], other, faster))
    longer = [RequestLength(200, 90)] * 30 * ENOUGH
    assert capacities.look(longer, other, faster) is None, "soon after the last"
    capacities.now_s = PAUSE_S
    case = capacities.look([], other, faster)
    assert isinstance(case, CapacityCase)
    assert set(case.lengths) == {longer[0]}


def test_who_states_a_capacity_needs_none() -> None:
    assert Capacities().look(LENGTHS, policy=msgspec.structs.replace(POLICY, capacity_per_s=2.0)) is None


def test_a_case_that_fails_says_why_and_holds_up_no_other() -> None:
    capacities = Capacities()
    failed = capacities.look(LENGTHS)
    assert capacities.made(failed, None, "too long") == (CapacityKnown("m", None, f"{PROFILE.name}: too long"),)
    other = msgspec.structs.replace(POLICY, model="n")
    case = capacities.look(LENGTHS, policy=other)
    assert isinstance(case, CapacityCase)
    assert capacities.manager.handle(Removed("n"), 0.0) == ()
    assert capacities.made(case) == (), "of a model that is scaled no more"


def test_a_faster_replica_sustains_more_and_one_that_refuses_the_requests_nothing() -> None:
    lengths = (RequestLength(200, 12),)
    slow, fast = (
        profiled_curve(CapacityCase(POLICY, profile_of("m", token_ms), lengths), 0, requests=150)
        for token_ms in (20.0, 10.0)
    )
    assert 0 < slow.capacity_per_s(0.9) < fast.capacity_per_s(0.9)
    too_long = (RequestLength(PROFILE.sizes.max_model_len_tokens + 1, 1),)
    with pytest.raises(PlanInfeasible, match="cannot serve requests"):
        profiled_curve(CapacityCase(POLICY, PROFILE, too_long), 0, requests=150)
