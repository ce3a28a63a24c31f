"""What profiling an instance found: what its steps cost, how fast it answers, and the quality it gives a batch."""

from typing import Annotated

import msgspec

from controlplane.model.step_costs import StepCosts
from controlplane.planning.cascade.replica import ReplicaShape
from controlplane.planning.qoe import QoeFit
from controlplane.prediction.running_tokens import DecodePoint, max_running_tokens
from controlplane.prediction.ttft import TtftCurve

PROFILES_PREFIX = "/penstock/profiles/"
"""Where profiles stand in the state store: engine, model and device follow, then the shape of several GPUs."""
VERSION = 1

_Degree = Annotated[int, msgspec.Meta(ge=1)]


class StepCoefficients(msgspec.Struct, frozen=True):
    """A step's duration as a sum, in ms; none is negative."""

    fixed_ms: float = 0.0
    prefill_step_ms: float = 0.0
    """Of a step that computes prompt tokens, however many."""
    prefill_token_ms: float = 0.0
    attended_pair_ms: float = 0.0
    """Per pair of a computed prompt token and a token that it attends to."""
    decode_request_ms: float = 0.0
    context_token_ms: float = 0.0
    """Per token of context that decoding requests read."""
    longest_token_ms: float = 0.0
    """Per token of the longest of these contexts, which other requests wait for."""

    def for_placement(self, max_step_tokens: int) -> StepCosts:
        """The same in the terms of placement: what a prefill step costs by itself is shared out to the tokens of a full
        one. The longest context, which placement does not know, is left out."""
        return StepCosts(
            self.fixed_ms,
            self.prefill_token_ms + self.prefill_step_ms / max(max_step_tokens, 1),
            self.decode_request_ms,
            self.context_token_ms,
            self.attended_pair_ms,
        )


class StepFit(msgspec.Struct, frozen=True):
    """The coefficients and how well they predict steps that they were not fitted to."""

    coefficients: StepCoefficients
    fitted_samples: int
    held_out_samples: int
    relative_error: float
    """Sum of |predicted - measured| over the sum of the measured durations of the held-out steps."""
    total_error: float
    """Sum of the predicted over the sum of the measured durations of the held-out steps, less 1."""


class UnevenPoint(msgspec.Struct, frozen=True):
    """Decode steps of so many requests: all equally long, and of the same total where one has half of the tokens."""

    requests: int
    context_tokens: float
    """In all, of the equal ones; medians, like everything here."""
    longest_tokens: float
    """Of the one with half of the tokens."""
    level_ms: float
    """Step of the equal ones."""
    uneven_ms: float
    """Step of the others, at the same total by the fitted costs."""
    error_ms: float
    """Half of the 95 % interval of the difference."""


class InstanceSizes(msgspec.Struct, frozen=True):
    """Limits of the instance that was profiled."""

    block_tokens: int
    kv_blocks: int
    max_model_len_tokens: int
    max_batch_requests: int
    max_step_tokens: int

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.kv_blocks * self.block_tokens


def profile_name(engine: str, model: str, device: str, shape: ReplicaShape) -> str:
    """What the profile of such an instance is called."""
    names = [engine, model, device]
    if shape.gpus > 1:
        names.append(f"tp{shape.tp}" + (f"-pp{shape.pp}" if shape.pp > 1 else ""))
    return "/".join(names)


class InstanceProfile(msgspec.Struct, frozen=True):
    """Fitted costs, which hold for every instance of the same engine, model, device and shape."""

    engine: str
    model: str
    device: str
    sizes: InstanceSizes
    step: StepFit
    ttft: TtftCurve
    """Arrow, section 5.3: from prompts that the idle instance computed alone."""
    decode_points: tuple[DecodePoint, ...]
    """Running tokens and step time of steps that only decode."""
    qoe: QoeFit
    """CascadeInfer, section 4.1, equation 1."""
    version: int = VERSION
    tensor_parallel: _Degree = 1
    """Of the instance that was profiled; profiles of a time when this was not noted count as one GPU."""
    pipeline_parallel: _Degree = 1
    unevenness: tuple[UnevenPoint, ...] = ()
    """Largest batch last. What of it costs is in the step's `longest_token_ms`, which is fitted to these steps, too."""

    @property
    def key(self) -> str:
        """The profile's key in the state store."""
        return PROFILES_PREFIX + self.name

    @property
    def name(self) -> str:
        """ENGINE/MODEL/DEVICE, and /tp4 or /tp4-pp2 for an instance of several GPUs."""
        return profile_name(self.engine, self.model, self.device, self.shape)

    @property
    def shape(self) -> ReplicaShape:
        """The GPUs that one such instance takes."""
        return ReplicaShape(self.tensor_parallel, self.pipeline_parallel)

    @property
    def step_costs(self) -> StepCosts:
        """What a step costs, for placement."""
        return self.step.coefficients.for_placement(self.sizes.max_step_tokens)

    def max_running_tokens(self, tpot_ms: float) -> int:
        """Tokens that an instance may decode at the same time within a TPOT (Arrow, section 5.3)."""
        return max_running_tokens(self.decode_points, tpot_ms, self.sizes.kv_tokens)
