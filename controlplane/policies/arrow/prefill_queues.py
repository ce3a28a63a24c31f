"""The prefill queues of all instances that a policy places on."""

from itertools import repeat

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.model.placement import PlacementProblem
from controlplane.model.snapshot import Snapshot
from controlplane.model.step_costs import DATASHEET_COSTS, CostRow
from controlplane.policies.arrow.prefill_queue import PrefillQueue
from controlplane.policies.arrow.profiled import COMPARED_TOKENS
from controlplane.prediction.ttft import TtftCurve

_DATASHEET = np.array(msgspec.structs.astuple(DATASHEET_COSTS))


def relative_prefill_times(snapshot: Snapshot) -> NDArray[np.float64] | None:
    """How long each instance takes for a prompt, by its own profile, over the slowest one; 1 where no profile is known.
    None: all instances are alike. The policy's TTFT curve is that of the slowest profile (`profiled.profile_for`), so
    that this makes it each instance's own (Arrow, section 5.3)."""
    if snapshot.uniform_costs is not None:
        return None
    is_known = (snapshot.costs != _DATASHEET[:, None]).any(axis=0)
    fixed, token, pair = (snapshot.costs[row] for row in (CostRow.FIXED, CostRow.PREFILL_TOKEN, CostRow.ATTENDED_PAIR))
    prefill_ms = fixed + COMPARED_TOKENS * token + COMPARED_TOKENS * (COMPARED_TOKENS + 1) / 2 * pair
    slowest_ms = prefill_ms[is_known].max(initial=0.0)
    return np.where(is_known & (slowest_ms > 0), prefill_ms / max(slowest_ms, 1e-9), 1.0)


class PrefillQueues:
    """A queue for each instance of each model, made when the instance is first seen, or known to be faster or slower
    than was thought, and dropped once it has gone."""

    def __init__(self, curve: TtftCurve) -> None:
        self._curve = curve
        self._queues: dict[str, dict[str, PrefillQueue]] = {}
        """By model, then by instance."""

    def delays_ms(self, snapshot: Snapshot) -> NDArray[np.float64]:
        """Predicted time until each instance has prefilled all that it has now. Shape (instances,)."""
        known = self._queues.get(snapshot.model, {})
        relative = relative_prefill_times(snapshot)
        curves = repeat(self._curve) if relative is None else map(self._curve.scaled, relative.tolist())
        queues = {}
        for instance, curve in zip(snapshot.instances, curves, strict=False):
            queue = known.get(instance.instance_id)
            queues[instance.instance_id] = queue if queue is not None and queue.curve == curve else PrefillQueue(curve)
        self._queues[snapshot.model] = queues
        pending = snapshot.pending_prefill_tokens.tolist()
        delays = (queue.delay_ms(tokens) for queue, tokens in zip(queues.values(), pending, strict=True))
        return np.fromiter(delays, np.float64, len(snapshot))

    def add(self, problem: PlacementProblem, row: int, new_tokens: int) -> None:
        """The request was placed there; `delays_ms` was called for its snapshot before."""
        queue = self._queues[problem.request.model][problem.snapshot.instances[row].instance_id]
        queue.add(new_tokens, int(problem.cached_tokens[row]))
