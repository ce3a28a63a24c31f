"""What operators may set of Arrow and of the baselines it is compared with."""

from typing import Annotated

import msgspec

from controlplane.policies.parameters import PolicyParameters
from controlplane.prediction.ttft import TtftCurve

Coefficient = Annotated[float, msgspec.Meta(ge=0)]
Milliseconds = Annotated[float, msgspec.Meta(gt=0, le=3_600_000)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]


class TtftParameters(PolicyParameters, frozen=True):
    """The TTFT curve of the instances: fixed + per token + per token squared, see `prediction.ttft`.

    Fit it to a profile of the instances. The defaults are derived, not measured: a Llama of 8B parameters in bf16 on
    one A100-80GB, with the costs that `simulation` has by default.
    """

    prefill_fixed_ms: Coefficient = 9.9
    prefill_token_ms: Coefficient = 0.103
    prefill_token_squared_ms: Coefficient = 1.7e-6

    @property
    def curve(self) -> TtftCurve:
        """The TTFT predictor that these coefficients make (Arrow, section 5.3)."""
        return TtftCurve(self.prefill_fixed_ms, self.prefill_token_ms, self.prefill_token_squared_ms)


class StaticParameters(TtftParameters, frozen=True):
    """Parameters of the policies that split the instances once, into prefill and decode."""

    prefill_instances: Annotated[int, msgspec.Meta(ge=0)] = 0
    """How many instances, the first ones by their ids, are for prefill; 0: half of them, rounded up. Instances that
    their operator has set aside for one phase keep to it."""


class ArrowParameters(TtftParameters, frozen=True):
    """SLOs and thresholds. The defaults of the SLOs are those of the paper's Azure Code trace (table 1)."""

    ttft_ms: Milliseconds = 3000.0
    """The TTFT threshold: what a request's predicted TTFT is held against."""
    tpot_ms: Milliseconds = 100.0
    """The TPOT threshold: what the average token interval of an instance is held against."""
    max_running_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Most tokens that an instance decodes within the TPOT, from a profile; its KV memory limits it in any case.
    0: its KV memory alone."""
    low_load: Fraction = 0.5
    """Decode load is low while the running tokens of the decode instances are at most this share of the Max Running
    Tokens of them all. The paper gives no figure; docs/papers/arrow.md shows how much hangs on it."""
    trigger_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 1.0
    """The token interval must have been above the TPOT threshold for so long before the monitor moves an instance, and
    again before it moves the next. So must a prefill instance have been idle, and decoding busy."""
