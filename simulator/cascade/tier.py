"""A tier's model on its devices: the shapes of replica that it fits on."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from controlplane.planning.cascade.replica import ReplicaShape
from mesh.errors import ConfigurationError
from simulator.cost.catalogue import Deployment, DeviceSpec, ModelSpec, deployment_for, instance_for
from simulator.cost.catalogue.deployment import MEMORY_UTILISATION
from simulator.cost.catalogue.unevenness import measured_unevenness
from simulator.cost.model import BatchShape, CostModel
from simulator.cost.roofline.cost import RooflineCost
from simulator.instance.config import InstanceConfig

# Step cost of pipeline parallelism.


@dataclass(frozen=True, slots=True)
class PipelineCost(CostModel):
    """A batch passes all layers one after the other, as without a pipeline, and hops between the stages.

    While one batch is in one stage, others are in the other stages: a pipeline of pp stages serves pp batches at
    once, each at this pace. Where those batches differ (a long prefill behind short decodes), real pipelines wait
    for the slowest; that is left out here, which flatters pipelines under mixed load.
    """

    layers: CostModel
    """Of all layers together, on the devices of one stage."""
    hops: int
    hop_ms: float
    hop_ms_per_token: float

    def step_ms(self, batch: BatchShape) -> float:
        tokens = batch.decode_requests + sum(chunk.new_tokens for chunk in batch.prefill)
        return self.layers.step_ms(batch) + self._hops_ms(tokens)

    def decode_run_ms(self, batch: BatchShape, steps: int) -> NDArray[np.float64]:
        return self.layers.decode_run_ms(batch, steps) + self._hops_ms(batch.decode_requests)

    def _hops_ms(self, tokens: int) -> float:
        return self.hops * (self.hop_ms + self.hop_ms_per_token * tokens)


TENSOR_PARALLEL = (1, 2, 4, 8)
"""Within one server of eight devices."""
PIPELINE_PARALLEL = (1, 2, 3, 4)
MAX_REPLICA_GPUS = 16
NODE_LINK_BYTES_PER_S = 25e9
"""Between the servers of a pipeline: a 200 Gb/s network card (Cascadia, section 4.1, has 200 GB/s of InfiniBand for a
server of eight)."""
STEP_TOKENS = 2048
"""As engines have it by default."""
HOP_MS = 0.05
"""Time to start a transfer between two pipeline stages."""


@dataclass(frozen=True, slots=True)
class ReplicaModel:
    """One replica in one shape, as the simulator takes it."""

    shape: ReplicaShape
    engine: InstanceConfig
    """Of one of its batches: a pipeline of pp stages has pp batches under way, which share its KV memory."""
    cost: CostModel
    engines: int
    """How many batches are under way at once: pp."""


class Tier(Hashable, Protocol):
    """A model, and the shapes of replica in which it can be served."""

    @property
    def key(self) -> str:
        """Tells tiers apart whose replicas differ; part of the name under which latency tables are kept."""

    def replicas(self) -> tuple[ReplicaModel, ...]:
        """One model for each shape of replica that the tier fits on, at least one."""


@dataclass(frozen=True, slots=True)
class TierModel:
    """The `Tier` of a model of the catalogue, on replicas of one device type."""

    model: str
    device: str
    weight_dtype: str = ""
    """Empty: the model's own."""
    max_gpus: int = MAX_REPLICA_GPUS
    """Largest number of GPUs of one replica."""
    step_tokens: int = STEP_TOKENS
    """`--max-num-batched-tokens`: a longer prompt is computed in chunks of what a step has room for."""

    @property
    def key(self) -> str:
        chunks = "" if self.step_tokens == STEP_TOKENS else f":{self.step_tokens}"
        return f"{self.model}@{self.device}:{self.weight_dtype}{chunks}"

    def checked(self) -> "TierModel":
        """Itself. Raises `ConfigurationError` for names that are not in the catalogue."""
        if not self.model or not self.device:
            raise ConfigurationError(f"{self.key!r} names no tier: give MODEL@DEVICE[:DTYPE], both as in the catalogue")
        deployment_for(self.model, self.device, 1, self.weight_dtype)
        return self

    def replicas(self) -> tuple[ReplicaModel, ...]:
        """Every shape that the model fits on. Raises `ConfigurationError` where there is none."""
        self.checked()
        fitting: list[ReplicaModel] = []
        why = ""
        for pp in PIPELINE_PARALLEL:
            for tp in TENSOR_PARALLEL:
                if tp * pp > self.max_gpus:
                    continue
                try:
                    fitting.append(self._replica(ReplicaShape(tp, pp)))
                except ConfigurationError as error:
                    why = str(error)
        if not fitting:
            raise ConfigurationError(f"no replica of {self.model} fits on {self.max_gpus} {self.device}: {why}")
        return tuple(fitting)

    def _replica(self, shape: ReplicaShape) -> ReplicaModel:
        deployment = deployment_for(self.model, self.device, shape.tp, self.weight_dtype)
        spec, device, dtype = deployment.model, deployment.device, deployment.dtype
        stages = stages_of(spec, shape.pp)
        config, _ = instance_for(stages[0], device, shape.tp, weight_dtype=dtype, max_step_tokens=self.step_tokens)
        # All stages keep the KV of the same tokens, so the one with the least room decides.
        blocks = min(
            Deployment(stage, device, shape.tp, dtype).kv_blocks(
                config.block_tokens, config.max_step_tokens, MEMORY_UTILISATION
            )
            for stage in stages
        )
        engine = _sharing(config, blocks // shape.pp)
        uneven = measured_unevenness(spec, device, shape.tp)
        cost: CostModel = RooflineCost(spec, device, shape.tp, dtype, unevenness=uneven)
        if shape.pp > 1:
            cost = PipelineCost(cost, shape.pp - 1, HOP_MS, _hop_ms_per_token(spec, device, shape))
        return ReplicaModel(shape, engine, cost, shape.pp)


def stages_of(spec: ModelSpec, pp: int) -> tuple[ModelSpec, ...]:
    """What each stage of a pipeline holds, as vLLM divides a model: layers in order, those left over on the stages
    before the last; the input embedding on the first stage, the output head on the last (a tied table on both), and
    layers with a dense MLP, which come first, where they fall."""
    if pp == 1:
        return (spec,)
    each, over = divmod(spec.layers, pp)
    assert each, f"{spec.layers} layers make no {pp} stages"
    stages: list[ModelSpec] = []
    before = 0
    for place in range(pp):
        layers = each + (1 if pp - 1 - over <= place < pp - 1 else 0)
        experts = spec.experts
        if experts is not None:
            experts = replace(experts, dense_layers=min(max(0, experts.dense_layers - before), layers))
        tables = spec.vocabulary_tokens if place in (0, pp - 1) else 0
        stages.append(replace(spec, layers=layers, experts=experts, vocabulary_tokens=tables, tied_embeddings=True))
        before += layers
    return tuple(stages)


def _sharing(engine: InstanceConfig, kv_blocks: int) -> InstanceConfig:
    """With one batch's share of the KV memory, and a context that it holds."""
    fits = kv_blocks * engine.block_tokens
    if fits < engine.max_step_tokens:
        raise ConfigurationError(f"{fits} tokens of KV are too few for one step of {engine.max_step_tokens}")
    return replace(engine, kv_blocks=kv_blocks, max_model_len_tokens=min(engine.max_model_len_tokens, fits))


def _hop_ms_per_token(spec: ModelSpec, device: DeviceSpec, shape: ReplicaShape) -> float:
    """A token's activations from one stage to the next; stages that do not share a server use its network."""
    bytes_per_s = device.link_bytes_per_s if shape.gpus <= max(TENSOR_PARALLEL) else NODE_LINK_BYTES_PER_S
    return 2.0 * spec.hidden_size / bytes_per_s * 1000
