"""What it takes to bring KV to an instance, as placement knows it, one column for each instance."""

import math
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.model.step_costs import StepCosts

PULL_BYTES_PER_MS: Final = 5e6
"""Of one pull, until pulls have been measured: a 100 Gbit/s link, less than half of it reached."""
LOAD_BYTES_PER_MS: Final = 12e6
"""Of a load from the host's memory, until loads have been measured: PCIe 4.0 x16, half of it reached."""


class KvCosts(msgspec.Struct, frozen=True):
    """pull_ms = pull_fixed_ms + pull_token_ms x tokens pulled from another instance, and the same for what is loaded
    from the host's memory.

    None per token: the instance cannot, or nobody has said that it can.
    """

    pull_fixed_ms: float = 2.0
    pull_token_ms: float | None = None
    load_fixed_ms: float = 0.5
    load_token_ms: float | None = None


NO_KV_COSTS: Final = KvCosts()


def datasheet_kv_costs(kv_token_bytes: int, *, pulls: bool, loads: bool) -> KvCosts:
    """A guess for an instance whose KV takes so many bytes a token (0: unknown, taken for an 8B Llama's in bf16)."""
    token_bytes = kv_token_bytes or 131_072
    return KvCosts(
        pull_token_ms=token_bytes / PULL_BYTES_PER_MS if pulls else None,
        load_token_ms=token_bytes / LOAD_BYTES_PER_MS if loads else None,
    )


_NEWS_SHARE: Final = 0.2


def computing_scale(costs: StepCosts, step_tokens: int, compute_token_ms: float) -> float | None:
    """What a measured millisecond is worth in those of an instance's step costs, which computes a token of a prompt in
    `compute_token_ms` (0: none was measured); None where that is not known.

    Bringing KV is weighed against computing it. Step costs may be a guess: on a CPU a token that was pulled in 0.13 ms
    looked dearer than one computed in the 0.11 ms of the data sheet's GPU, and took 2.3 ms to compute.
    """
    if compute_token_ms <= 0:
        return None
    return (costs.prefill_token_ms + costs.fixed_ms / max(1, step_tokens)) / compute_token_ms


def with_measured(known: KvCosts, *, pull_token_ms: float, load_token_ms: float) -> KvCosts:
    """With what pulls from other instances and loads from the host's memory were measured to take (0: none was);
    `known` itself where that is no news, since every change makes a new snapshot."""
    news: dict[str, float] = {}
    if _is_news(known.pull_token_ms, pull_token_ms):
        news["pull_token_ms"] = pull_token_ms
    if _is_news(known.load_token_ms, load_token_ms):
        news["load_token_ms"] = load_token_ms
    return msgspec.structs.replace(known, **news) if news else known


def _is_news(former_ms: float | None, token_ms: float) -> bool:
    return token_ms > 0 and former_ms is not None and abs(token_ms - former_ms) > _NEWS_SHARE * former_ms


class KvCostRow:
    """Rows of `Snapshot.kv_costs`, in the order of the fields of `KvCosts`; infinite where the field is None."""

    PULL_FIXED: Final = 0
    PULL_TOKEN: Final = 1
    LOAD_FIXED: Final = 2
    LOAD_TOKEN: Final = 3
    COUNT: Final = 4


def kv_cost_column(costs: KvCosts) -> list[float]:
    """The costs as a column of `Snapshot.kv_costs`."""
    return [math.inf if value is None else value for value in msgspec.structs.astuple(costs)]


def kv_costs_of(column: NDArray[np.float64]) -> KvCosts:
    """The costs that a column stands for."""
    pull_fixed_ms, pull_token_ms, load_fixed_ms, load_token_ms = column.tolist()
    return KvCosts(
        pull_fixed_ms,
        None if math.isinf(pull_token_ms) else pull_token_ms,
        load_fixed_ms,
        None if math.isinf(load_token_ms) else load_token_ms,
    )
