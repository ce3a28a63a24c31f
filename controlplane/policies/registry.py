"""Placement policies by the name that operators use."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from controlplane.policies.arrow.colocated import Colocated
from controlplane.policies.arrow.parameters import ArrowParameters, StaticParameters, TtftParameters
from controlplane.policies.arrow.policy import Arrow
from controlplane.policies.arrow.static_split import StaticMinimalLoad, StaticRoundRobin
from controlplane.policies.dynamo import Dynamo, DynamoParameters
from controlplane.policies.filter import Filter, FilterParameters
from controlplane.policies.interface import Policy, PolicyFactory
from controlplane.policies.least_loaded import LeastLoaded
from controlplane.policies.linear import Linear, LinearParameters
from controlplane.policies.lmetric import LMetric
from controlplane.policies.lmetric_hotspot import HotspotParameters, LMetricHotspot
from controlplane.policies.lmetric_plus import LMetricPlus
from controlplane.policies.parameters import checked
from controlplane.policies.penstock import Penstock
from controlplane.policies.products import HitRatioTimesBatch, PTokenTimesTokens
from controlplane.policies.random_two import RandomTwo, RandomTwoParameters
from controlplane.policies.round_robin import RoundRobin
from controlplane.policies.simulation import Simulation, SimulationParameters
from controlplane.policies.stages.placement import Stages
from mesh.errors import ConfigurationError
from mesh.plugins import PluginRegistry


def _plain(make: Callable[[], Policy]) -> PolicyFactory:
    return PolicyFactory(lambda _: make())


OWN_POLICIES: Final[Mapping[str, PolicyFactory]] = MappingProxyType(
    {
        RoundRobin.name: _plain(RoundRobin),
        LeastLoaded.name: _plain(LeastLoaded),
        LMetric.name: _plain(LMetric),
        LMetricPlus.name: _plain(LMetricPlus),
        Penstock.name: _plain(Penstock),
        LMetricHotspot.name: PolicyFactory(LMetricHotspot, HotspotParameters),
        Linear.name: PolicyFactory(Linear, LinearParameters),
        Dynamo.name: PolicyFactory(Dynamo, DynamoParameters),
        Filter.name: PolicyFactory(Filter, FilterParameters),
        Simulation.name: PolicyFactory(Simulation, SimulationParameters),
        HitRatioTimesBatch.name: _plain(HitRatioTimesBatch),
        PTokenTimesTokens.name: _plain(PTokenTimesTokens),
        RandomTwo.name: PolicyFactory(RandomTwo, RandomTwoParameters),
        Stages.name: _plain(Stages),
        Arrow.name: PolicyFactory(Arrow, ArrowParameters),
        StaticMinimalLoad.name: PolicyFactory(StaticMinimalLoad, StaticParameters),
        StaticRoundRobin.name: PolicyFactory(StaticRoundRobin, StaticParameters),
        Colocated.name: PolicyFactory(Colocated, TtftParameters),
    }
)
POLICIES: Final = PluginRegistry("penstock.policies", "placement policy", PolicyFactory, OWN_POLICIES)
"""Penstock's own policies and those of installed packages."""
DEFAULT_POLICY: Final = Penstock.name
NO_PARAMETERS: Mapping[str, float] = MappingProxyType({})


def create_policy(name: str, parameters: Mapping[str, float] = NO_PARAMETERS) -> Policy:
    """A fresh policy; parameters that are not given have their defaults.

    Raises `ConfigurationError` for a policy that there is not or that cannot be loaded, a parameter that it does not
    have, and a value out of bounds.
    """
    factory = POLICIES.get(name)
    policy = factory.make(checked(factory.parameters, name, parameters))
    if policy.name != name:  # placements and recordings name their policy, and must find it again by that name
        raise ConfigurationError(
            f"the placement policy {name!r} of {POLICIES.source(name)} calls itself {policy.name!r}; "
            "its package must use one name"
        )
    return policy
