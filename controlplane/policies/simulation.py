"""Placement by a predicted time to first token."""

from typing import Annotated, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.model.placement import Decision, PlacementProblem
from controlplane.model.step_costs import DATASHEET_COSTS, StepCosts
from controlplane.policies.indicators import p_token, total_tokens, uncached_tokens
from controlplane.policies.parameters import PolicyParameters
from controlplane.policies.selection import RoundRobinCounter, among_candidates, lowest

Coefficient = Annotated[float, msgspec.Meta(ge=0)]


class SimulationParameters(PolicyParameters, frozen=True):
    """What an engine step costs, where it is not what is known of each instance. A prediction is tuned if these were
    fitted to the instances that it is made for.

    step = fixed_ms + decode_request_ms x decoding requests + context_token_ms x their context tokens
         + prefill_token_ms x prompt tokens computed + attended_pair_ms x pairs of tokens that attend

    Left at the defaults, each instance has the costs of its own profile; the datasheet's, where it has none.
    """

    fixed_ms: Coefficient = DATASHEET_COSTS.fixed_ms
    prefill_token_ms: Coefficient = DATASHEET_COSTS.prefill_token_ms
    decode_request_ms: Coefficient = DATASHEET_COSTS.decode_request_ms
    context_token_ms: Coefficient = DATASHEET_COSTS.context_token_ms
    attended_pair_ms: Coefficient = DATASHEET_COSTS.attended_pair_ms
    output_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Output to count with its predicted time per token; 0 predicts the time to first token alone, as llm-d does."""


QWEN3_30B_A3B_ON_H20 = SimulationParameters(
    fixed_ms=19.1, prefill_token_ms=0.0892, context_token_ms=3.07e-5, attended_pair_ms=1.06e-5
)
"""By the same derivation: H20 (148 TFLOP/s, 4.0 TB/s); 61 GB of weights, all read in each step; 3.3B parameters
active per token; 48 layers of 32 heads and 4 KV heads of 128."""
QWEN2_7B_ON_H20 = SimulationParameters(
    fixed_ms=4.75, prefill_token_ms=0.205, context_token_ms=1.79e-5, attended_pair_ms=5.4e-6
)
"""By the same derivation: 7.6B parameters, 28 layers of 28 heads and 4 KV heads of 128. For Qwen3-30B-A3B, this is
the paper's untuned simulator (LMetric, section 4.6)."""


class Simulation:
    """score = predicted TTFT in ms (plus output_tokens x predicted TPOT), lowest wins (LMetric, figure 14: llm-d).

    A closed form stands for the simulator: what waits and the request's uncached tokens are computed in chunks,
    each beside the running batch, whose size and context stay as they are. It knows no attention cost of other
    requests' prompts, no preemption and no limit on the batch.
    """

    name: ClassVar[str] = "simulation"
    rule: ClassVar[str] = "score = predicted TTFT in ms + output_tokens x predicted TPOT, from the cost of engine steps"

    def __init__(self, parameters: SimulationParameters) -> None:
        self.parameters = parameters
        self._turns = RoundRobinCounter()
        given = StepCosts(*msgspec.structs.astuple(parameters)[:-1])
        self._given = None if given == DATASHEET_COSTS else np.array([msgspec.structs.astuple(given)]).T
        """The operator's costs, the same for every instance; None: each instance has its own."""

    def decide(self, problem: PlacementProblem) -> Decision:
        predicted_ms = self.ttft_ms(problem)
        if self.parameters.output_tokens:
            predicted_ms = predicted_ms + self.parameters.output_tokens * self.tpot_ms(problem)
        scores = among_candidates(predicted_ms, problem.candidates)
        turn = self._turns.next(problem.request.model)
        indicators = {
            "p_token": p_token(problem),
            "running_requests": problem.snapshot.running_requests,
            "running_tokens": problem.snapshot.running_tokens,
            "cached_tokens": problem.cached_tokens,
        }
        return Decision(lowest(scores, turn), scores, indicators)

    def ttft_ms(self, problem: PlacementProblem) -> NDArray[np.float64]:
        """Time until the request's whole prompt is computed, on each instance."""
        snapshot = problem.snapshot
        fixed_ms, prefill_token_ms, decode_request_ms, context_token_ms, attended_pair_ms = self._costs(problem)
        decoding = snapshot.running_requests
        prefill = p_token(problem)
        steps = -(-prefill // np.maximum(snapshot.step_tokens - decoding, 1))
        beside_ms = fixed_ms + decode_request_ms * decoding + context_token_ms * snapshot.running_tokens
        uncached = np.maximum(uncached_tokens(problem), 1)
        pairs = uncached * (problem.cached_tokens + (uncached + 1) / 2)
        ttft_ms: NDArray[np.float64] = steps * beside_ms + prefill_token_ms * prefill + attended_pair_ms * pairs
        return ttft_ms

    def tpot_ms(self, problem: PlacementProblem) -> NDArray[np.float64]:
        """Duration of a decode step with everything that waits and the request in the batch, on each instance."""
        fixed_ms, _, decode_request_ms, context_token_ms, _ = self._costs(problem)
        context = total_tokens(problem) + problem.request.prompt_tokens
        batch = problem.snapshot.batch_requests + 1
        tpot_ms: NDArray[np.float64] = fixed_ms + decode_request_ms * batch + context_token_ms * context
        return tpot_ms

    def _costs(self, problem: PlacementProblem) -> NDArray[np.float64]:
        """Shape (CostRow.COUNT, instances), or one column for all of them."""
        return problem.snapshot.costs if self._given is None else self._given
