"""The one interface of placement policies."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeGuard

from controlplane.model.placement import Decision, DecodeChoice, PlacementProblem
from controlplane.model.snapshot import Snapshot
from controlplane.policies.parameters import PolicyParameters


class Policy(Protocol):
    """Chooses the instance for a request. The same objects run in the live mesh and in the simulator.

    A policy is a deterministic function of the problems it has been shown, in their order: no I/O, no clock
    (`request.now_s` is the time), no global randomness (a policy that draws owns a generator made from a seed).
    What it remembers is bounded. Policies compose: one that filters calls another with fewer candidates.
    """

    name: ClassVar[str]
    """The name by which operators select the policy."""
    rule: ClassVar[str]
    """The rule in one line, for `explain`."""

    @property
    def parameters(self) -> PolicyParameters:
        """The parameters in force, for `penstock policy` and recordings."""

    def decide(self, problem: PlacementProblem) -> Decision:
        """Choose among the candidates, of which there is at least one."""


@dataclass(frozen=True, slots=True)
class PolicyFactory:
    """How a policy is made. What an entry point of the group `penstock.policies` refers to (docs/plugins.md)."""

    make: Callable[[Any], Policy]
    """From parameters of the type beside it; a fresh policy each time."""
    parameters: type[PolicyParameters] = PolicyParameters
    """What operators may set of it."""


class Observer(Policy, Protocol):
    """A policy that also looks at the cluster in time, whether or not a request comes.

    Whoever runs the policy calls `observe` for each model that is served, every `interval_s` of its clock or, where
    its own steps are longer, as soon after as it can. What it sees is part of what its decisions are a function of.
    """

    interval_s: ClassVar[float]

    def observe(self, snapshot: Snapshot, now_s: float) -> None:
        """Look at the model's instances. `now_s` is on the same clock as `PlacementRequest.now_s`."""


class LateDecider(Policy, Protocol):
    """A policy that can choose where a request is decoded at the end of its prefill, with what is known by then.

    Whoever runs the policy and can ask that late says so in the problem (`is_decode_chosen_later`).
    """

    def decide_decode(self, problem: PlacementProblem, prefill_row: int) -> DecodeChoice:
        """Choose among the decode candidates, or leave the request at `prefill_row`, where its KV is."""


def decides_late(policy: Policy) -> TypeGuard[LateDecider]:
    """Whether the policy chooses where to decode at the end of the prefill, if asked then."""
    return hasattr(policy, "decide_decode")


class Pooled(Policy, Protocol):
    """A policy that keeps instances in pools of its own making."""

    def pools(self, model: str) -> Mapping[str, str]:
        """The pool of each instance of the model, as of the policy's last look: what a scheduler that leads next goes
        on with, and for people and metrics."""

    def resume(self, model: str, pools: Mapping[str, str]) -> None:
        """Go on with the pools that another scheduler has made under this policy; its own of this model, if it has
        any, are forgotten. A pool that it does not know counts for nothing."""


def has_pools(policy: Policy) -> TypeGuard[Pooled]:
    """Whether the policy keeps pools."""
    return hasattr(policy, "pools")


class IgnoresProgress(Policy, Protocol):
    """A policy to which it makes no difference how far the requests that decode have come: of the indicators it reads
    only those of requests, of prompts to be computed and of the cache. The simulator then spares itself the others."""

    ignores_progress: ClassVar[bool]


def ignores_progress(policy: Policy) -> bool:
    """Whether the policy says so; one that says nothing may read all there is."""
    return bool(getattr(policy, "ignores_progress", False))


def is_observer(policy: Policy) -> TypeGuard[Observer]:
    """Whether the policy wants to be shown the cluster in time."""
    return hasattr(policy, "observe")
