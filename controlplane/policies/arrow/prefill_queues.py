"""The prefill queues of all instances that a policy places on."""

import numpy as np
from numpy.typing import NDArray

from controlplane.model.placement import PlacementProblem
from controlplane.model.snapshot import Snapshot
from controlplane.policies.arrow.prefill_queue import PrefillQueue
from controlplane.prediction.ttft import TtftCurve


class PrefillQueues:
    """A queue for each instance of each model, made when the instance is first seen and dropped once it has gone."""

    def __init__(self, curve: TtftCurve) -> None:
        self._curve = curve
        self._queues: dict[str, dict[str, PrefillQueue]] = {}
        """By model, then by instance."""

    def delays_ms(self, snapshot: Snapshot) -> NDArray[np.float64]:
        """Predicted time until each instance has prefilled all that it has now. Shape (instances,)."""
        known = self._queues.get(snapshot.model, {})
        queues = {
            instance.instance_id: known.get(instance.instance_id) or PrefillQueue(self._curve)
            for instance in snapshot.instances
        }
        self._queues[snapshot.model] = queues
        pending = snapshot.pending_prefill_tokens.tolist()
        delays = (queue.delay_ms(tokens) for queue, tokens in zip(queues.values(), pending, strict=True))
        return np.fromiter(delays, np.float64, len(snapshot))

    def add(self, problem: PlacementProblem, row: int, new_tokens: int) -> None:
        """The request was placed there; `delays_ms` was called for its snapshot before."""
        queue = self._queues[problem.request.model][problem.snapshot.instances[row].instance_id]
        queue.add(new_tokens, int(problem.cached_tokens[row]))
