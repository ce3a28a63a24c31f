"""Bounds of migrations that nobody can keep are refused."""

import pytest

from controlplane.protocols.migration.limits import ManagerLimits
from mesh.errors import ConfigurationError


def limits(name: str, value: int) -> ManagerLimits:
    return ManagerLimits(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["parallel", "arriving", "transfer_tries", "remembered"])
def test_of_these_there_must_be_one_at_least(name: str) -> None:
    limits(name, 1)
    with pytest.raises(ConfigurationError, match=rf"{name}.* must be 1 or more, got .*{name}=0"):
        limits(name, 0)


@pytest.mark.parametrize("name", ["queued", "migration_ms", "transfer_retry_ms", "remember_ms"])
def test_these_may_be_zero_and_not_less(name: str) -> None:
    limits(name, 0)
    with pytest.raises(ConfigurationError, match=rf"must not be negative, got .*{name}=-1"):
        limits(name, -1)
