"""The load of every instance in Arrow's terms (section 5.3)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controlplane.model.snapshot import Integers, Snapshot
from controlplane.policies.arrow.prefill_queues import PrefillQueues


@dataclass(frozen=True, slots=True, eq=False)
class InstanceLoads:
    """Arrays of shape (instances,), in the order of the snapshot."""

    prefill_delay_ms: NDArray[np.float64]
    """Until all that is queued there is prefilled."""
    running_tokens: Integers
    """Of the requests being processed and of those on their way to be decoded there."""
    max_running_tokens: Integers
    token_interval_ms: NDArray[np.float64]
    """Average over the sliding window of the instance; 0 where nothing decodes."""
    is_prefilling: NDArray[np.bool_]
    """Has prompts left to compute."""
    is_decoding: NDArray[np.bool_]
    """Has requests left to decode, or on their way."""


def loads_of(snapshot: Snapshot, queues: PrefillQueues, max_running_tokens: int) -> InstanceLoads:
    """The loads now. `max_running_tokens` 0: what the KV memory holds."""
    kv_tokens: Integers = snapshot.kv_blocks_total * snapshot.block_tokens
    return InstanceLoads(
        prefill_delay_ms=queues.delays_ms(snapshot),
        running_tokens=snapshot.running_tokens + snapshot.unreported_decode_tokens,
        max_running_tokens=np.minimum(kv_tokens, max_running_tokens) if max_running_tokens else kv_tokens,
        token_interval_ms=snapshot.token_interval_us / 1000,
        is_prefilling=(snapshot.pending_prefill_tokens > 0) | (snapshot.unreported_requests > 0),
        is_decoding=(snapshot.decoding_requests > 0) | (snapshot.unreported_decodes > 0),
    )
