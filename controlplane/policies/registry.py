"""Placement policies by the name that operators use."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from controlplane.policies.interface import Policy
from controlplane.policies.least_loaded import LeastLoaded
from controlplane.policies.lmetric import LMetric
from controlplane.policies.round_robin import RoundRobin
from mesh.errors import ConfigurationError

POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {RoundRobin.name: RoundRobin, LeastLoaded.name: LeastLoaded, LMetric.name: LMetric}
)
DEFAULT_POLICY = LMetric.name


def create_policy(name: str) -> Policy:
    """A fresh policy. Raises `ConfigurationError` for a name that is not registered."""
    if name not in POLICIES:
        raise ConfigurationError(f"there is no placement policy {name!r}; choose one of: {', '.join(POLICIES)}")
    return POLICIES[name]()
