"""The cost of an engine step as placement knows it, one column for each instance."""

from typing import Final

import msgspec


class StepCosts(msgspec.Struct, frozen=True):
    """step_ms = fixed_ms + prefill_token_ms x prompt tokens computed + decode_request_ms x decoding requests
    + context_token_ms x their context tokens + attended_pair_ms x pairs of a prompt token computed and one attended to.

    The defaults are derived, not measured: a Llama of 8B parameters in bf16 on one A100-80GB by its datasheet, half of
    the compute and 80 % of the bandwidth taken to be reached.
    """

    fixed_ms: float = 9.9
    prefill_token_ms: float = 0.103
    decode_request_ms: float = 0.02
    context_token_ms: float = 8.0e-5
    attended_pair_ms: float = 3.4e-6


DATASHEET_COSTS: Final = StepCosts()


class CostRow:
    """Rows of `Snapshot.costs`, in the order of the fields of `StepCosts`."""

    FIXED: Final = 0
    PREFILL_TOKEN: Final = 1
    DECODE_REQUEST: Final = 2
    CONTEXT_TOKEN: Final = 3
    ATTENDED_PAIR: Final = 4
    COUNT: Final = 5
