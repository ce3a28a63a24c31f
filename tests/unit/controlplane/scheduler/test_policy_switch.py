"""Which policy places."""

from dataclasses import dataclass

import pytest

from controlplane.scheduler.policy_switch import PolicySwitch
from mesh.errors import ConfigurationError
from mesh.leadership_state import LeaderRecord
from tests.unit.controlplane.builders import profile


def test_the_fallback_stands_in_until_a_monitor_is_heard() -> None:
    switch = PolicySwitch("lmetric", silence_s=2.0)
    assert switch.refresh(None, 0.0)
    assert switch.in_force.name == "round_robin"
    assert "no monitor" in switch.fallback_reason
    assert switch.refresh(1.0, 1.5)
    assert switch.in_force.name == "lmetric"


def test_the_fallback_stands_in_while_the_monitor_is_silent() -> None:
    switch = PolicySwitch("least_loaded", silence_s=2.0)
    assert not switch.refresh(10.0, 12.0)
    assert switch.refresh(10.0, 12.1)
    assert switch.in_force.name == "round_robin"
    assert switch.configured.name == "least_loaded"
    assert not switch.refresh(10.0, 15.0), "told once"
    assert switch.refresh(15.5, 16.0)
    assert switch.in_force.name == "least_loaded"


def test_switching_to_the_same_policy_keeps_what_it_remembers() -> None:
    switch = PolicySwitch("lmetric", silence_s=2.0)
    before = switch.configured
    assert not switch.configure("lmetric")
    assert switch.configured is before
    assert switch.configure("round_robin")
    assert switch.in_force.name == "round_robin"


def test_other_parameters_make_another_policy() -> None:
    switch = PolicySwitch("lmetric", silence_s=2.0)
    assert switch.configure("linear", {"lambda": 0.4})
    tuned = switch.configured
    assert not switch.configure("linear", {"lambda": 0.4})
    assert switch.configured is tuned
    assert switch.configure("linear")
    assert switch.configured.parameters.values() == {"lambda": 0.7}


@pytest.mark.parametrize(("name", "parameters"), [("best", {}), ("linear", {"lambda": 2.0}), ("lmetric", {"x": 1.0})])
def test_what_cannot_be_made_changes_nothing(name: str, parameters: dict[str, float]) -> None:
    switch = PolicySwitch("lmetric", silence_s=2.0)
    with pytest.raises(ConfigurationError):
        switch.configure(name, parameters)
    assert switch.in_force.name == "lmetric"


def test_a_profile_gives_what_nobody_has_set() -> None:
    switch = PolicySwitch("arrow", silence_s=2.0)
    assert switch.note_profile(profile(0.5))
    arrow = switch.configured
    values = arrow.parameters.values()
    assert (values["prefill_fixed_ms"], values["prefill_token_ms"], values["prefill_token_squared_ms"]) == (5.0, 0.5, 0)
    assert values["max_running_tokens"] == 16_000, "a step with all of its memory takes less than the TPOT of 100 ms"
    assert switch.profile_key == "/penstock/profiles/simulated/m/simulated"
    assert not switch.note_profile(profile(0.5))
    assert switch.configured is arrow, "it keeps its pools"
    assert switch.configure("arrow", {"tpot_ms": 40.0, "prefill_token_ms": 2.0})
    values = switch.configured.parameters.values()
    assert (values["prefill_token_ms"], values["max_running_tokens"]) == (2.0, 5000)
    assert switch.configure("lmetric")
    assert not switch.note_profile(profile(0.7)), "lmetric predicts nothing"
    assert switch.profile_key == ""


@dataclass
class Pools:
    """Who leads, as a test says."""

    is_leading: bool = False
    epoch: int = 1
    leader: LeaderRecord | None = None


def test_a_policy_with_pools_places_in_the_scheduler_that_leads_them_only() -> None:
    pools = Pools()
    switch = PolicySwitch("arrow", 2.0, pools)
    assert switch.refresh(0.0, 1.0), "from nobody heard to nobody leading"
    assert (switch.in_force.name, switch.is_standby) == ("penstock", False)
    assert switch.fallback_reason == "no scheduler leads the pools of arrow yet"
    pools.leader = LeaderRecord("pools", "other", "1", epoch=5)
    assert (switch.in_force.name, switch.is_standby, switch.leader_id) == ("penstock", True, "other")
    assert "other leads the pools of arrow" in switch.fallback_reason
    pools.is_leading, pools.leader = True, LeaderRecord("pools", "this", "1", epoch=6)
    assert switch.refresh(0.0, 1.0)
    assert (switch.in_force.name, switch.fallback_reason, switch.leader_id) == ("arrow", "", "this")
    assert switch.refresh(0.0, 5.0)
    assert switch.in_force.name == "round_robin", "a leader that hears no monitor, too"


def test_a_policy_without_pools_places_in_every_scheduler() -> None:
    switch = PolicySwitch("lmetric", 2.0, Pools(leader=LeaderRecord("pools", "other", "1", epoch=5)))
    switch.refresh(0.0, 1.0)
    assert (switch.in_force.name, switch.leader_id, switch.is_standby) == ("lmetric", "", False)
    assert switch.configure("arrow")
    assert (switch.in_force.name, switch.leader_id) == ("penstock", "other")
