"""A model on a device: whether it fits, how much KV it leaves room for, what its steps cost."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from mesh.errors import ConfigurationError
from simulator.cost.catalogue.devices import DEVICES
from simulator.cost.catalogue.models import MODELS
from simulator.cost.catalogue.unevenness import measured_unevenness
from simulator.cost.fitted.unevenness import UnevennessTable
from simulator.cost.model import CostModel
from simulator.cost.roofline.cost import RooflineCost
from simulator.cost.roofline.efficiency import Efficiency
from simulator.cost.spec.device import DeviceSpec
from simulator.cost.spec.model import ModelSpec
from simulator.instance.config import InstanceConfig, OutputConfig

MEMORY_UTILISATION = 0.9
"""vLLM's default gpu_memory_utilization."""
_RUNTIME_BYTES = 2.0e9
"""CUDA context, communication buffers, captured graphs: what vLLM logs for a device is 1 to 3 GB."""

_Spec = TypeVar("_Spec")


@dataclass(frozen=True, slots=True)
class Deployment:
    """One instance: `tensor_parallel` devices that hold one copy of the model."""

    model: ModelSpec
    device: DeviceSpec
    tensor_parallel: int = 1
    weight_dtype: str = ""
    """bf16, fp8 or fp4; empty: the model's own."""
    kv_element_bytes: float = 2.0

    def __post_init__(self) -> None:
        self.model.check_tensor_parallel(self.tensor_parallel)

    @property
    def dtype(self) -> str:
        """Data type of the weights."""
        return self.weight_dtype or self.model.weight_dtype

    @property
    def kv_bytes_per_token(self) -> float:
        """Of one token, replicas of heads counted once: what a transfer moves."""
        return self.model.kv_bytes_per_token(1, self.kv_element_bytes)

    def kv_blocks(self, block_tokens: int, max_step_tokens: int, memory_utilisation: float) -> int:
        """Blocks that fit beside weights and activations. Raises `ConfigurationError` where none do."""
        weights = self.model.weight_bytes(self.dtype) / self.tensor_parallel
        # A step's widest tensors: residual and its copy, and gate, up and their product of one layer; in bf16.
        widest = 4 * self.model.hidden_size + 3 * self.model.intermediate_size // self.tensor_parallel
        budget = self.device.memory_bytes * memory_utilisation
        left = budget - weights - 2.0 * max_step_tokens * widest - _RUNTIME_BYTES
        per_block = block_tokens * self.model.kv_bytes_per_token(self.tensor_parallel, self.kv_element_bytes)
        blocks = int(left // per_block)
        if blocks < 1:
            raise ConfigurationError(
                f"{self.model.name} in {self.dtype} needs {weights / 1e9:,.1f} GB of weights on each of "
                f"{self.tensor_parallel} {self.device.name}, which leaves no room for KV in {budget / 1e9:,.1f} GB: "
                "use more devices or a narrower number format"
            )
        return blocks


def deployment_for(model: str, device: str, tensor_parallel: int = 1, weight_dtype: str = "") -> Deployment:
    """By the names of the catalogue, upper and lower case alike. Raises `ConfigurationError`, naming what there is."""
    return Deployment(_named(MODELS, model, "model"), _named(DEVICES, device, "device"), tensor_parallel, weight_dtype)


def instance_for(
    model: str | ModelSpec,
    device: str | DeviceSpec,
    tp: int = 1,
    *,
    weight_dtype: str = "",
    heterogeneity: bool = True,
    unevenness: UnevennessTable | None = None,
    memory_utilisation: float = MEMORY_UTILISATION,
    block_tokens: int = 16,
    max_batch_requests: int = 256,
    max_step_tokens: int = 2048,
    max_model_len_tokens: int | None = None,
    max_queued_requests: int = 4096,
    kv_element_bytes: float = 2.0,
    efficiency: Efficiency | None = None,
) -> tuple[InstanceConfig, CostModel]:
    """An instance of `model` on `tp` devices: its sizes, and what its steps cost by the roofline model.

    `kv_blocks` is what memory leaves after the weights (docs/cost_models.md); the context is the model's longest,
    or what fits. `block_bytes` is the size of a block's KV on all devices together. `heterogeneity` off: decode
    attention costs what equal lengths of the same total would. `unevenness`: what unequal ones cost more, as it was
    measured somewhere; None: as measured on the device, or else by the tile model. Raises `ConfigurationError`.
    """
    deployment = Deployment(
        model if isinstance(model, ModelSpec) else _named(MODELS, model, "model"),
        device if isinstance(device, DeviceSpec) else _named(DEVICES, device, "device"),
        tp,
        weight_dtype,
        kv_element_bytes,
    )
    spec = deployment.model
    blocks = deployment.kv_blocks(block_tokens, max_step_tokens, memory_utilisation)
    fits = blocks * block_tokens
    config = InstanceConfig(
        block_tokens=block_tokens,
        kv_blocks=blocks,
        max_model_len_tokens=min(max_model_len_tokens or spec.max_context_tokens, fits),
        max_batch_requests=max_batch_requests,
        max_step_tokens=max_step_tokens,
        max_queued_requests=max_queued_requests,
        block_bytes=block_tokens * round(deployment.kv_bytes_per_token),
        output=replace(OutputConfig(), vocabulary_tokens=spec.vocabulary_tokens),
    )
    cost = RooflineCost(
        spec,
        deployment.device,
        tp,
        deployment.dtype,
        kv_element_bytes=kv_element_bytes,
        heterogeneity=heterogeneity,
        unevenness=measured_unevenness(spec, deployment.device, tp, unevenness),
        efficiency=efficiency or Efficiency(),
    )
    return config, cost


def _named(specs: Mapping[str, _Spec], name: str, kind: str) -> _Spec:
    for known, spec in specs.items():
        if known.lower() == name.lower():
            return spec
    raise ConfigurationError(f"no {kind} {name!r} is in the catalogue; there are {', '.join(specs)}")
