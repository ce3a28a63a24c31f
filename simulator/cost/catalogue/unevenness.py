"""Unevenness of attention by the card that it was measured on.

`python -m benchmarks.unevenness --data DIR --json OUT` fits these numbers. The measurements are LLMServingSim's (CASYS
Lab at KAIST, MIT licence; vLLM 0.19, bf16, three models on one and two cards); they are not part of this repository.
"""

from simulator.cost.fitted.unevenness import MEAN_TOKENS, TILES, MeasuredUnevenness, UnevennessTable
from simulator.cost.spec.device import DeviceSpec
from simulator.cost.spec.model import ModelSpec

UNEVENNESS = {
    "RTX-PRO-6000": UnevennessTable(
        188,
        TILES,
        MEAN_TOKENS,
        (
            (0.0455, 0.0645, 0.2836, 0.0),
            (0.0271, 0.1091, 0.0111, 0.0075),
            (0.0344, 0.0565, 0.0, 0.0262),
            (0.0375, 0.0094, 0.0148, 0.022),
            (0.0188, 0.0251, 0.0507, 0.0207),
            (0.0102, 0.0, 0.0, 0.0),
            (0.046, 0.0, 0.0, 0.0),
            (0.0375, 0.0643, 0.0841, 0.0384),
            (0.0149, 0.032, 0.0353, 0.0149),
            (0.0048, 0.012, 0.0148, 0.0043),
        ),
        (0.046014, 0.045031, 0.043851, 0.036817, 0.038453, 0.04115, 0.037518, 0.041581, 0.052208, 0.052208),
    ),
}


def measured_unevenness(
    model: ModelSpec, device: DeviceSpec, tensor_parallel: int, table: UnevennessTable | None = None
) -> MeasuredUnevenness | None:
    """Of a model on `tensor_parallel` devices, by `table`, or by that of the device where there is one."""
    table = table or UNEVENNESS.get(device.name)
    if table is None or model.latent:
        return None
    return MeasuredUnevenness(table, max(1, model.kv_heads // tensor_parallel), device.multiprocessors)
