"""Parameters that operators set."""

import pytest

from controlplane.policies.registry import create_policy
from mesh.errors import ConfigurationError


def test_what_is_not_given_has_its_default() -> None:
    assert create_policy("linear").parameters.values() == {"lambda": 0.7}
    assert create_policy("linear", {"lambda": 0.4}).parameters.values() == {"lambda": 0.4}
    values = create_policy("simulation", {"fixed_ms": 1}).parameters.values()
    assert (values["fixed_ms"], values["prefill_token_ms"]) == (1, 0.103)


def test_whole_numbers_may_come_as_floats() -> None:
    assert create_policy("filter", {"range": 4.0}).parameters.values() == {"range": 4}


@pytest.mark.parametrize(
    ("name", "parameters", "says"),
    [
        ("linear", {"lambda": 1.1}, r"<= 1.*lambda.*lambda=0\.7"),
        ("linear", {"mu": 0.5}, r"unknown field `mu`.*lambda=0\.7"),
        ("lmetric_hotspot", {"mu": 0.5}, "defaults: window_s=60, max_classes=64, hold_s=0$"),
        ("linear", {"lambda": float("nan")}, "finite"),
        ("dynamo", {"prefill_weight": float("inf")}, "finite"),
        ("filter", {"range": 2.5}, "int"),
        ("random_two", {"seed": -1}, ">= 0"),
        ("lmetric", {"lambda": 0.5}, "defaults: none"),
    ],
)
def test_what_a_policy_cannot_take_is_refused_with_the_choice(
    name: str, parameters: dict[str, float], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        create_policy(name, parameters)
