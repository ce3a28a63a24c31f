"""Kernel tables of vLLM in the form that LLMServingSim publishes: llmservingsim_KIND_CARD.csv.gz, for any card.

Those of vLLM 0.19 on an RTX PRO 6000 are public; of another card they are whoever measures its."""

from collections.abc import Mapping
from itertools import pairwise

from mesh.errors import ConfigurationError
from simulator.cost.catalogue.models import MODELS
from simulator.cost.fitted.interpolation import Curve, Grid
from simulator.cost.fitted.operators import AttentionTables, ExpertTables, Links, OperatorTables
from simulator.profiles.folder import ProfileFolder

LAYERS_TWICE = ("layernorm",)
LAYERS_ONCE_A_STEP = ("embedding", "final_layernorm")
_MICRO = 1e-3  # microseconds to ms

HOP_MS = 0.020
LINK_BYTES_PER_MS = 16e9 / 1000
"""Between two cards without NVLink: what LLMServingSim states of its machine (link_latency, link_bw)."""


def card_of(device: str) -> str:
    """How file names write a device of the catalogue: RTXPRO6000 for RTX-PRO-6000."""
    return device.replace("-", "")


def kernel_tables(
    folder: ProfileFolder, model: str, device: str, tensor_parallel: int, expert_devices: int = 1
) -> OperatorTables:
    """Of a model on a device of the catalogue. `expert_devices`: among how many its experts are divided.

    Raises `ConfigurationError` where the folder has no such table.
    """
    spec, card = MODELS[model], card_of(device)
    dense = _mine(folder.rows(f"llmservingsim_dense_{card}"), model, tensor_parallel)
    per_sequence = _mine(folder.rows(f"llmservingsim_per_sequence_{card}"), model, tensor_parallel)
    attention = _mine(folder.rows(f"llmservingsim_attention_{card}"), model, tensor_parallel)
    layers = {row["layer"] for row in dense}
    once = layers & set(LAYERS_ONCE_A_STEP)
    return OperatorTables(
        layers=spec.layers,
        hidden_size=spec.hidden_size,
        layer=_sum_curve(dense, "tokens", {name: 2 if name in LAYERS_TWICE else 1 for name in layers - once}),
        step=_sum_curve(dense, "tokens", dict.fromkeys(once, 1)),
        sequence=_sum_curve(per_sequence, "sequences", {"lm_head": 1, "sampler": 1}),
        attention=_attention(attention),
        experts=_experts(folder, model, card, expert_devices) if spec.experts else None,
        tensor_links=_links(tensor_parallel),
    )


def _links(devices: int) -> Links | None:
    return Links(devices, HOP_MS, LINK_BYTES_PER_MS) if devices > 1 else None


def _mine(rows: list[dict[str, str]], model: str, tensor_parallel: int) -> list[dict[str, str]]:
    mine = [row for row in rows if is_model(row["model"], model) and int(row["tp"]) == tensor_parallel]
    if not mine:
        there = sorted({f"{row['model']} on {row['tp']}" for row in rows})
        raise ConfigurationError(f"no table of {model} on {tensor_parallel} device(s); there are {', '.join(there)}")
    return mine


def is_model(published: str, model: str) -> bool:
    """Whether a published name means a model of the catalogue; its instruction-tuned form has the same shape."""
    name = published.rpartition("/")[2].lower()
    return name == model.lower() or name.startswith(model.lower() + "-instruct")


def _sum_curve(rows: list[dict[str, str]], axis: str, times: dict[str, int]) -> Curve:
    total: dict[int, float] = {}
    for row in rows:
        weight = times.get(row["layer"], 0)
        if weight:
            point = int(row[axis])
            total[point] = total.get(point, 0.0) + weight * float(row["time_us"]) * _MICRO
    return Curve(tuple(sorted(total)), tuple(total[point] for point in sorted(total)))


def _attention(rows: list[dict[str, str]]) -> AttentionTables:
    columns = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    measured = {tuple(int(row[name]) for name in columns): float(row["time_us"]) * _MICRO for row in rows}
    decode: dict[tuple[int, ...], float] = {
        (point[2], point[3]): time_ms for point, time_ms in measured.items() if not point[0]
    }
    prefill: dict[tuple[int, ...], float] = {
        (point[0], point[1]): time_ms for point, time_ms in measured.items() if not point[2]
    }
    mixed = {point: time_ms for point, time_ms in measured.items() if point[0] and point[2]}
    return AttentionTables(prefill=_densest(prefill), decode=_densest(decode), mixed=_densest(mixed))


def _densest(points: Mapping[tuple[int, ...], float]) -> Grid:
    """The grid of the points that doubling reaches in each axis: the tables hold it whole, and a finer one in part."""
    axes = [_doubling({point[axis] for point in points}) for axis in range(len(next(iter(points))))]
    return Grid.from_points(axes, {tuple(map(float, point)): value for point, value in points.items()})


def _doubling(points: set[int]) -> list[float]:
    smallest = min(point for point in points if point)
    chain = [point for point in sorted(points) if point % smallest == 0 and (point // smallest).bit_count() <= 1]
    if any(right != 2 * left for left, right in pairwise(point for point in chain if point)):
        raise ConfigurationError(f"a table's points {chain} should double, and leave some out")
    return [float(point) for point in chain]


def _experts(folder: ProfileFolder, model: str, card: str, devices: int) -> ExpertTables:
    rows = _mine(folder.rows(f"llmservingsim_moe_{card}"), model, 1)
    spec = MODELS[model]
    if spec.experts is None:
        raise ConfigurationError(f"{model} has no experts")
    measured: dict[tuple[float, ...], float] = {
        (float(row["tokens"]), float(row["activated_experts"])): float(row["time_us"]) * _MICRO for row in rows
    }
    tokens = sorted({point[0] for point in measured})
    experts = sorted({point[1] for point in measured})
    # Few tokens cannot reach many experts, so a corner of the grid is empty: the time there follows the experts'.
    for count in reversed(tokens):
        for number in experts:
            if (count, number) not in measured:
                measured[count, number] = measured[min(t for t in tokens if (t, number) in measured), number]
    return ExpertTables(Grid.from_points((tokens, experts), measured), spec.experts, spec.hidden_size, _links(devices))
