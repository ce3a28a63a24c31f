"""Placement policies by the name that operators use."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from controlplane.policies.arrow.colocated import Colocated
from controlplane.policies.arrow.parameters import ArrowParameters, StaticParameters, TtftParameters
from controlplane.policies.arrow.policy import Arrow
from controlplane.policies.arrow.static_split import StaticMinimalLoad, StaticRoundRobin
from controlplane.policies.dynamo import Dynamo, DynamoParameters
from controlplane.policies.filter import Filter, FilterParameters
from controlplane.policies.interface import Policy
from controlplane.policies.least_loaded import LeastLoaded
from controlplane.policies.linear import Linear, LinearParameters
from controlplane.policies.lmetric import LMetric
from controlplane.policies.lmetric_hotspot import HotspotParameters, LMetricHotspot
from controlplane.policies.lmetric_plus import LMetricPlus
from controlplane.policies.parameters import PolicyParameters, checked
from controlplane.policies.products import HitRatioTimesBatch, PTokenTimesTokens
from controlplane.policies.random_two import RandomTwo, RandomTwoParameters
from controlplane.policies.round_robin import RoundRobin
from controlplane.policies.simulation import Simulation, SimulationParameters
from controlplane.policies.stages.placement import Stages
from mesh.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Registered:
    """How a policy is made."""

    make: Callable[[Any], Policy]
    """From parameters of the type beside it."""
    parameters: type[PolicyParameters]


def _plain(make: Callable[[], Policy]) -> Registered:
    """A policy without parameters."""
    return Registered(lambda _: make(), PolicyParameters)


POLICIES: Mapping[str, Registered] = MappingProxyType(
    {
        RoundRobin.name: _plain(RoundRobin),
        LeastLoaded.name: _plain(LeastLoaded),
        LMetric.name: _plain(LMetric),
        LMetricPlus.name: _plain(LMetricPlus),
        LMetricHotspot.name: Registered(LMetricHotspot, HotspotParameters),
        Linear.name: Registered(Linear, LinearParameters),
        Dynamo.name: Registered(Dynamo, DynamoParameters),
        Filter.name: Registered(Filter, FilterParameters),
        Simulation.name: Registered(Simulation, SimulationParameters),
        HitRatioTimesBatch.name: _plain(HitRatioTimesBatch),
        PTokenTimesTokens.name: _plain(PTokenTimesTokens),
        RandomTwo.name: Registered(RandomTwo, RandomTwoParameters),
        Stages.name: _plain(Stages),
        Arrow.name: Registered(Arrow, ArrowParameters),
        StaticMinimalLoad.name: Registered(StaticMinimalLoad, StaticParameters),
        StaticRoundRobin.name: Registered(StaticRoundRobin, StaticParameters),
        Colocated.name: Registered(Colocated, TtftParameters),
    }
)
DEFAULT_POLICY = LMetric.name
NO_PARAMETERS: Mapping[str, float] = MappingProxyType({})


def create_policy(name: str, parameters: Mapping[str, float] = NO_PARAMETERS) -> Policy:
    """A fresh policy; parameters that are not given have their defaults.

    Raises `ConfigurationError` for a policy that is not registered, a parameter that it does not have, and a value
    out of bounds.
    """
    if name not in POLICIES:
        raise ConfigurationError(f"there is no placement policy {name!r}; choose one of: {', '.join(POLICIES)}")
    registered = POLICIES[name]
    return registered.make(checked(registered.parameters, name, parameters))
