"""Attention tables where none were measured: the roofline model on equal lengths."""

import numpy as np

from simulator.cost.fitted.interpolation import Grid
from simulator.cost.fitted.operators import AttentionTables
from simulator.cost.model import PrefillChunk
from simulator.cost.roofline.attention_of import decode_attention, prefill_attention
from simulator.cost.roofline.efficiency import Efficiency
from simulator.cost.roofline.lengths import DecodeLengths
from simulator.cost.spec.device import DeviceSpec
from simulator.cost.spec.model import ModelSpec

_TOKENS = tuple(float(1 << power) for power in range(18))
_CONTEXTS = (0.0, *_TOKENS)
_REQUESTS = tuple(float(1 << power) for power in range(10))


def sampled_attention(model: ModelSpec, device: DeviceSpec, tensor_parallel: int) -> AttentionTables:
    """Attention times of one layer by the roofline model, as the tables that `TableCost` interpolates."""
    prefill = prefill_attention(model, device, tensor_parallel, Efficiency())
    decode = decode_attention(model, device, tensor_parallel)

    def decode_ms(requests: float, context: float) -> float:
        contexts = np.full(int(requests), max(1, int(context)), dtype=np.int64)
        return float(decode.layer_ms(DecodeLengths.of_step(contexts, int(contexts.sum()))))

    return AttentionTables(
        prefill=Grid.from_points(
            (_TOKENS, _CONTEXTS),
            {
                (new, before): prefill.layer_ms(PrefillChunk(int(new), int(before)))
                for new in _TOKENS
                for before in _CONTEXTS
            },
        ),
        decode=Grid.from_points(
            (_REQUESTS, _CONTEXTS), {(n, context): decode_ms(n, context) for n in _REQUESTS for context in _CONTEXTS}
        ),
    )
