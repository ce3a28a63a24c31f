"""Which policy places."""

import pytest

from controlplane.scheduler.policy_switch import PolicySwitch
from mesh.errors import ConfigurationError


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
