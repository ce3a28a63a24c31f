"""Vidur's operator tables (A100, H100): projections and MLP by tokens and degree, attention of one head layout on two
A100, all-reduces."""

from statistics import median

import numpy as np

from mesh.errors import ConfigurationError
from simulator.cost.catalogue import DEVICES, MODELS
from simulator.cost.fitted.interpolation import Curve, Grid
from simulator.cost.fitted.operators import AttentionTables, MeasuredAllReduce, OperatorTables
from simulator.cost.model import PrefillChunk
from simulator.cost.roofline.attention import decode_attention, prefill_attention
from simulator.cost.roofline.efficiency import Efficiency
from simulator.cost.roofline.lengths import DecodeLengths
from simulator.cost.spec.device import DeviceSpec
from simulator.cost.spec.model import ModelSpec
from simulator.profiles.folder import ProfileFolder

# Attention tables where none were measured: the roofline model on equal lengths.


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


GPUS = {"A100-80G": "a100", "H100": "h100"}
MODEL_NAMES = {
    "Llama-2-7B": "meta-llama/Llama-2-7b-hf",
    "Llama-2-70B": "meta-llama/Llama-2-70b-hf",
    "Llama-3.1-8B": "meta-llama/Meta-Llama-3-8B",
    "Llama-3.1-70B": "meta-llama/Meta-Llama-3-70B",
    "Llama-3.3-70B": "meta-llama/Meta-Llama-3-70B",
}
"""Llama 3.1 and 3.3 have the shapes of Llama 3."""
_ONCE_A_LAYER = (
    "input_layernorm",
    "attn_pre_proj",
    "attn_rope",
    "attn_post_proj",
    "post_attention_layernorm",
    "mlp_up_proj",
    "mlp_act",
    "mlp_down_proj",
    "add",
    "add",
)
_ATTENTION_MODELS = ("Llama-2-70B", "Llama-3.1-70B", "Llama-3.3-70B")
"""64 query and 8 KV heads of 128, which is what the attention table was measured with, on two devices."""
_ATTENTION_DEGREE = 2


def vidur_tables(folder: ProfileFolder, model: str, device: str, tensor_parallel: int) -> OperatorTables:
    """Raises `ConfigurationError` where Vidur has not measured it."""
    gpu, name = GPUS.get(device), MODEL_NAMES.get(model)
    rows = folder.rows(f"vidur_mlp_{gpu}") if gpu else []
    rows = [row for row in rows if row["model"] == name and int(row["num_tensor_parallel_workers"]) == tensor_parallel]
    if not rows:
        raise ConfigurationError(f"Vidur's tables have no {model} on {tensor_parallel} {device}")
    spec = MODELS[model]
    return OperatorTables(
        layers=spec.layers,
        hidden_size=spec.hidden_size,
        layer=_curve(rows, _ONCE_A_LAYER),
        step=_curve(rows, ("emb",)),
        # The output head was not measured; per token it is a projection of the same kind as the MLP's.
        sequence=_head(rows, spec.vocabulary_tokens // tensor_parallel),
        attention=_attention(folder, model, device, tensor_parallel),
        tensor_links=_all_reduce(folder, gpu or "", tensor_parallel) if tensor_parallel > 1 else None,
    )


def _curve(rows: list[dict[str, str]], operators: tuple[str, ...]) -> Curve:
    by_tokens: dict[int, list[float]] = {}
    for row in rows:
        time_ms = sum(float(row[f"time_stats.{name}.median"] or 0.0) for name in operators)
        by_tokens.setdefault(int(row["num_tokens"]), []).append(time_ms)
    return Curve(tuple(sorted(by_tokens)), tuple(median(by_tokens[tokens]) for tokens in sorted(by_tokens)))


def _head(rows: list[dict[str, str]], outputs: int) -> Curve:
    row = rows[0]
    columns = 2 * int(row["n_expanded_embd"]) // int(row["num_tensor_parallel_workers"])
    up = _curve(rows, ("mlp_up_proj",))
    return Curve(up.points, tuple(value * outputs / columns for value in up.values))


def _attention(folder: ProfileFolder, model: str, device: str, tensor_parallel: int) -> AttentionTables:
    sampled = sampled_attention(MODELS[model], DEVICES[device], tensor_parallel)
    if device != "A100-80G" or model not in _ATTENTION_MODELS or tensor_parallel != _ATTENTION_DEGREE:
        return sampled
    decode: dict[tuple[float, ...], float] = {}
    for row in folder.rows("vidur_attention_a100_llama70b_tp2"):
        if row["is_prefill"] == "False":
            decode[float(row["batch_size"]), float(row["kv_cache_size"])] = float(row["time_stats.attn_decode.median"])
    requests = sorted({point[0] for point in decode})
    contexts = [
        context
        for context in sorted({point[1] for point in decode})
        if all((count, context) in decode for count in requests)
    ]
    return AttentionTables(prefill=sampled.prefill, decode=Grid.from_points((requests, contexts), decode))


def _all_reduce(folder: ProfileFolder, gpu: str, devices: int) -> MeasuredAllReduce:
    """Within one node whose devices all take part."""
    by_size: dict[float, list[float]] = {}
    for row in folder.rows("vidur_network_a100_h100"):
        if (
            row["system"].startswith(f"{gpu}_")
            and row["op"] == "all_reduce"
            and int(row["num_workers"]) == int(row["devices_per_node"]) == devices
        ):
            by_size.setdefault(float(row["size"]), []).append(float(row["time_ms.median"]))
    if not by_size:
        raise ConfigurationError(f"Vidur's tables have no all-reduce among {devices} {gpu}")
    return MeasuredAllReduce(Curve(tuple(sorted(by_size)), tuple(median(by_size[size]) for size in sorted(by_size))))
