"""Indicators that several policies share, over all instances at once (LMetric, section 3: a policy is a few lines
over symbolic indicators). Shape (instances,)."""

import numpy as np
from numpy.typing import NDArray

from controlplane.model.placement import PlacementProblem


def uncached_tokens(problem: PlacementProblem) -> NDArray[np.int64]:
    """Prompt tokens of the request that the instance would have to compute; 0 where all of it is cached."""
    tokens: NDArray[np.int64] = np.maximum(problem.request.prompt_tokens - problem.cached_tokens, 0)
    return tokens


def p_token(problem: PlacementProblem) -> NDArray[np.int64]:
    """LMetric's P-token: what the instance would have to prefill if it got the request, at least 1.

    Prompt tokens still to be computed there plus the request's own uncached ones.
    """
    uncached = problem.request.prompt_tokens - problem.cached_tokens
    tokens: NDArray[np.int64] = np.maximum(problem.snapshot.pending_prefill_tokens + uncached, 1)
    return tokens


def total_tokens(problem: PlacementProblem) -> NDArray[np.int64]:
    """Tokens of the instance's requests: context of the running ones and prompts that are still to be computed."""
    return problem.snapshot.running_tokens + problem.snapshot.pending_prefill_tokens


def kv_hit(problem: PlacementProblem) -> NDArray[np.float64]:
    """Fraction of the prompt that the instance has cached, 0 to 1."""
    return np.minimum(problem.cached_tokens / max(problem.request.prompt_tokens, 1), 1.0)
