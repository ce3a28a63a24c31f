"""Which instances a request for a LoRA adapter goes to. The policy chooses among them.

An instance that has the adapter is preferred, because to load it takes the time of some steps, for everybody there. But
one that has it must not become the only one that ever serves it: an instance without it is as good once it is so much
less busy. S-LoRA and Punica batch requests of different adapters, which costs little; what costs is an adapter beyond
those that one step serves (vLLM's `max_loras`), whose requests wait until another one's have ended.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from controlplane.model.cluster import ClusterTable
from controlplane.model.instance import InstanceDescription
from controlplane.model.snapshot import Snapshot

LOAD_WORTH_REQUESTS: Final = 4
"""To load an adapter counts as much as so many requests in the batch."""
NO_ADAPTERS: Final = "serves no LoRA adapters"
NOT_LOADABLE: Final = "could not load the LoRA adapter of this request a moment ago"
NOT_LOADED: Final = (
    f"would have to load the LoRA adapter, and has not {LOAD_WORTH_REQUESTS} requests less than one that has it"
)
BUSY: Final = "runs as many LoRA adapters as one of its steps serves"


def refusal(table: ClusterTable, instance: InstanceDescription, digest: str) -> str:
    """Why the instance cannot serve the adapter; empty if it can."""
    if not instance.max_loras:
        return NO_ADAPTERS
    return NOT_LOADABLE if digest in table.load(instance.instance_id).adapters.refused else ""


def preferred(
    table: ClusterTable, snapshot: Snapshot, digest: str, candidates: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], dict[str, str]]:
    """Those of the candidates that a request for the adapter had better go to, and why not to each other one."""
    has_it, is_free = np.zeros_like(candidates), np.zeros_like(candidates)
    for row in np.flatnonzero(candidates).tolist():
        instance = snapshot.instances[row]
        adapters = table.load(instance.instance_id).adapters
        is_used = digest in adapters.in_use
        has_it[row] = is_used or digest in adapters.idle
        is_free[row] = is_used or len(adapters.in_use) < instance.max_loras
    ready, could = has_it & is_free, candidates & is_free & ~has_it
    if ready.any():
        busy = snapshot.batch_requests
        chosen = ready | (could & (busy + LOAD_WORTH_REQUESTS <= busy[ready].min()))
    elif could.any():
        chosen = could
    else:
        return candidates, {}
    passed_over = {
        snapshot.instances[row].instance_id: NOT_LOADED if could[row] else BUSY
        for row in np.flatnonzero(candidates & ~chosen).tolist()
    }
    return chosen, passed_over
