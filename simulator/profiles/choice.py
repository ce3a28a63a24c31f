"""A cost model from whichever published tables have a model on a device."""

from collections.abc import Callable

from mesh.errors import ConfigurationError
from simulator.cost.catalogue import DEVICES, MODELS
from simulator.cost.catalogue.unevenness import measured_unevenness
from simulator.cost.fitted.table_cost import TableCost
from simulator.cost.fitted.unevenness import Unevenness
from simulator.cost.model import CostModel
from simulator.cost.roofline.attention import decode_attention
from simulator.profiles.folder import ProfileFolder
from simulator.profiles.kernel_tables import kernel_tables
from simulator.profiles.step_formulas import distserve_cost, splitwise_cost
from simulator.profiles.vidur_tables import vidur_tables

GRAPH_TOKENS = 512
"""vLLM's largest captured graph by default."""


def cost_from_tables(
    folder: ProfileFolder, model: str, device: str, tensor_parallel: int, source: str = ""
) -> CostModel:
    """By catalogue names, from `source` or else from the first of `SOURCES` that has it. Raises
    `ConfigurationError`, with what each source says, where none has."""
    if source and source not in SOURCES:
        raise ConfigurationError(f"no tables are called {source!r}; there are {', '.join(SOURCES)}")
    reasons: list[str] = []
    for name in (source,) if source else SOURCES:
        try:
            return SOURCES[name](folder, model, device, tensor_parallel)
        except ConfigurationError as error:
            reasons.append(f"{name}: {error}")
    raise ConfigurationError("; ".join(reasons))


def _kernels(folder: ProfileFolder, model: str, device: str, tensor_parallel: int) -> TableCost:
    if model not in MODELS or device not in DEVICES:
        raise ConfigurationError(
            f"kernel tables are read for models and devices of the catalogue, not {model} on {device}"
        )
    tables = kernel_tables(folder, model, device, tensor_parallel)
    return TableCost(tables, unevenness_of(model, device, tensor_parallel), graph_tokens=GRAPH_TOKENS)


def unevenness_of(model: str, device: str, tensor_parallel: int) -> Unevenness:
    """As measured on the device; where it was not, by the tile model of its kernel."""
    measured = measured_unevenness(MODELS[model], DEVICES[device], tensor_parallel)
    return measured or decode_attention(MODELS[model], DEVICES[device], tensor_parallel)


def _vidur(folder: ProfileFolder, model: str, device: str, tensor_parallel: int) -> TableCost:
    tables = vidur_tables(folder, model, device, tensor_parallel)
    return TableCost(tables, decode_attention(MODELS[model], DEVICES[device], tensor_parallel))


SOURCES: dict[str, Callable[[ProfileFolder, str, str, int], CostModel]] = {
    "llmservingsim": _kernels,
    "vidur": _vidur,
    "distserve": distserve_cost,
    "splitwise": splitwise_cost,
}
