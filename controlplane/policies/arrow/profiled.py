"""Arrow's parameters from a profile of the instances, where their operator has set none (Arrow, section 5.3)."""

from collections.abc import Iterable, Mapping

import msgspec

from controlplane.model.instance import InstanceDescription
from controlplane.planning.instance_profile import InstanceProfile
from controlplane.policies.arrow.parameters import ArrowParameters, TtftParameters
from controlplane.policies.parameters import PolicyParameters

COMPARED_TOKENS = 1000
"""Profiles, and instances by theirs, are compared by how long a prompt of this length takes."""
_CURVE = ("prefill_fixed_ms", "prefill_token_ms", "prefill_token_squared_ms")


def profile_for(
    instances: Iterable[InstanceDescription], profiles: Iterable[InstanceProfile]
) -> InstanceProfile | None:
    """The profile to predict by, None if there is none of these instances' model and engine. Those of instances on
    the same device go before others, and then those cut over as many GPUs. Of several, the slowest: the
    policy's curve is that of the slowest instance, and others are faster by their own profiles."""
    kinds: set[tuple[str, str]] = set()
    devices: set[tuple[str, str, str]] = set()
    shapes: set[tuple[str, str, int, int]] = set()
    for each in instances:
        kinds.add((each.model, each.engine))
        devices.add((each.model, each.engine, each.device))
        shapes.add((each.model, each.engine, each.tensor_parallel, each.pipeline_parallel))
    known = [profile for profile in profiles if (profile.model, profile.engine) in kinds]
    known = [each for each in known if (each.model, each.engine, each.device) in devices] or known
    alike = [each for each in known if (each.model, each.engine, each.shape.tp, each.shape.pp) in shapes]
    return max(alike or known, key=lambda profile: profile.ttft.prefill_ms(COMPARED_TOKENS), default=None)


def profiled(parameters: PolicyParameters, profile: InstanceProfile) -> Mapping[str, float]:
    """All values, those of the profile in the place of what is at its default: the TTFT curve as a whole, and Max
    Running Tokens within the policy's own TPOT. Policies that predict nothing keep theirs."""
    values = parameters.values()
    if not isinstance(parameters, TtftParameters):
        return values
    defaults = type(parameters)().values()
    if all(values[name] == defaults[name] for name in _CURVE):
        values |= dict(zip(_CURVE, msgspec.structs.astuple(profile.ttft), strict=True))
    batches = {point.running_tokens for point in profile.decode_points}
    if isinstance(parameters, ArrowParameters) and not parameters.max_running_tokens and len(batches) > 1:
        # 0 would mean no limit but the memory; where not even the smallest batch keeps the TPOT, none is small enough.
        values["max_running_tokens"] = max(1, profile.max_running_tokens(parameters.tpot_ms))
    return values
