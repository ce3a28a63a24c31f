"""What Arrow measures of an instance when a cluster is launched (Arrow, section 5.3), measured of a modelled one."""

import numpy as np

from controlplane.prediction.running_tokens import DecodePoint, max_running_tokens
from controlplane.prediction.ttft import TtftCurve, TtftPoint, fit_ttft
from simulator.cost.model import BatchShape, CostModel, PrefillChunk
from simulator.instance.config import InstanceConfig

SHORTEST_PROMPT_TOKENS = 64
SHORTEST_CONTEXT_TOKENS = 64


def profile_ttft(config: InstanceConfig, cost: CostModel) -> tuple[TtftPoint, ...]:
    """Times of prompts of 64, 128, 256, ... tokens, up to the context, that an idle instance computes alone."""
    lengths = []
    tokens = SHORTEST_PROMPT_TOKENS
    while tokens < config.max_model_len_tokens:
        lengths.append(tokens)
        tokens *= 2
    return tuple(TtftPoint(tokens, _prefill_ms(tokens, config, cost)) for tokens in lengths)


def fit_instance(config: InstanceConfig, cost: CostModel) -> TtftCurve:
    """The TTFT curve of an instance."""
    return fit_ttft(profile_ttft(config, cost))


def profile_running_tokens(config: InstanceConfig, cost: CostModel, tpot_ms: float) -> int:
    """Max Running Tokens: what its KV memory holds, or less where a step with more would take longer than the TPOT.

    Measured with full batches (the largest number of requests) of equal contexts: of all batches with as many tokens,
    the slowest.
    """
    kv_tokens = config.kv_blocks * config.block_tokens
    points = []
    tokens = config.max_batch_requests * SHORTEST_CONTEXT_TOKENS
    while tokens <= kv_tokens:
        contexts = np.full(config.max_batch_requests, tokens // config.max_batch_requests, np.int64)
        batch = BatchShape(decode_context_tokens=contexts, decode_context_tokens_sum=int(contexts.sum()))
        points.append(DecodePoint(int(contexts.sum()), cost.step_ms(batch)))
        tokens *= 2
    return max_running_tokens(points, tpot_ms, kv_tokens) if len(points) > 1 else kv_tokens


def _prefill_ms(prompt_tokens: int, config: InstanceConfig, cost: CostModel) -> float:
    """As the instance computes it: in chunks of its token budget."""
    total_ms, done = 0.0, 0
    while done < prompt_tokens:
        chunk = PrefillChunk(min(config.max_step_tokens, prompt_tokens - done), done)
        total_ms += cost.step_ms(BatchShape(prefill=(chunk,)))
        done += chunk.new_tokens
    return total_ms
