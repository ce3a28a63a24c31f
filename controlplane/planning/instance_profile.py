"""What profiling an instance found: what its steps cost, how fast it answers, and the quality it gives a batch."""

import msgspec

from controlplane.planning.qoe import QoeFit
from controlplane.prediction.running_tokens import DecodePoint, max_running_tokens
from controlplane.prediction.ttft import TtftCurve

PROFILES_PREFIX = "/penstock/profiles/"
"""Where profiles stand in the state store: engine, model and device follow."""
VERSION = 1


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


class StepFit(msgspec.Struct, frozen=True):
    """The coefficients and how well they foretell steps that they were not fitted to."""

    coefficients: StepCoefficients
    fitted_samples: int
    held_out_samples: int
    relative_error: float
    """Sum of |foretold - measured| over the sum of the measured durations of the held-out steps."""
    total_error: float
    """Sum of the foretold over the sum of the measured durations of the held-out steps, less 1."""


class InstanceSizes(msgspec.Struct, frozen=True):
    """Limits of the instance that was profiled."""

    block_tokens: int
    kv_blocks: int
    max_model_len_tokens: int
    max_batch_requests: int
    max_step_tokens: int

    @property
    def kv_tokens(self) -> int:
        """That its KV cache holds."""
        return self.kv_blocks * self.block_tokens


class InstanceProfile(msgspec.Struct, frozen=True):
    """Of every instance with the same engine, model and device."""

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

    @property
    def key(self) -> str:
        """Where it stands in the state store."""
        return PROFILES_PREFIX + "/".join((self.engine, self.model, self.device))

    def max_running_tokens(self, tpot_ms: float) -> int:
        """Tokens that an instance may decode at the same time within a TPOT (Arrow, section 5.3)."""
        return max_running_tokens(self.decode_points, tpot_ms, self.sizes.kv_tokens)
