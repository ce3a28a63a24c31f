"""The options that say what a simulated instance is: which model on which device, and what its steps cost."""

from dataclasses import dataclass
from typing import Any

import click

from mesh.errors import ConfigurationError
from simulator.cost.catalogue import DEVICES, MODELS, instance_for
from simulator.cost.linear import LinearCost
from simulator.cost.model import CostModel
from simulator.cost.spec.model import WEIGHT_BYTES
from simulator.instance.config import InstanceConfig

_KV_BLOCKS = 26_000
_MAX_MODEL_LEN_TOKENS = 131_072

cost_options = (
    click.option(
        "--model",
        metavar="NAME",
        help=f"Model of the catalogue, with --device: {', '.join(MODELS)}. Without: an 8B model on an A100, linear.",
    ),
    click.option("--device", metavar="NAME", help=f"Device of the catalogue: {', '.join(DEVICES)}."),
    click.option("--tp", type=click.IntRange(1, 64), default=1, show_default=True, help="Devices an instance has."),
    click.option(
        "--weights",
        "weight_dtype",
        type=click.Choice(list(WEIGHT_BYTES)),
        show_default="the model's own",
        help="Number format of the weights.",
    ),
    click.option(
        "--levelled-attention",
        is_flag=True,
        help="Let decode attention cost what equal lengths of the same total would: an ablation.",
    ),
)


@dataclass(frozen=True, slots=True)
class CostChoice:
    """Where the costs of a simulated step come from."""

    model: str | None = None
    device: str | None = None
    tensor_parallel: int = 1
    weight_dtype: str = ""
    heterogeneity: bool = True

    def __post_init__(self) -> None:
        if (self.model is None) != (self.device is None):
            raise ConfigurationError("--model and --device go together: costs follow from both")

    def create(self) -> CostModel:
        """The cost model. Raises `ConfigurationError`."""
        if self.model is None or self.device is None:
            return LinearCost()
        return self._instance()[1]

    def sizes(self) -> InstanceConfig | None:
        """What the device has room for; None where no device is named."""
        return None if self.model is None else self._instance()[0]

    def _instance(self) -> tuple[InstanceConfig, CostModel]:
        return instance_for(
            self.model or "",
            self.device or "",
            self.tensor_parallel,
            weight_dtype=self.weight_dtype,
            heterogeneity=self.heterogeneity,
        )


def costs_of(options: dict[str, Any]) -> CostChoice:
    """Raises `ConfigurationError`."""
    return CostChoice(
        options["model"],
        options["device"],
        options["tp"],
        options["weight_dtype"] or "",
        not options["levelled_attention"],
    )


def instance_of(options: dict[str, Any]) -> InstanceConfig:
    """Sizes as the options say, and what they leave open from the catalogue. Raises `ConfigurationError`."""
    sizes = costs_of(options).sizes()
    block_tokens = options["block_tokens"]
    kv_blocks = options["kv_blocks"]
    max_model_len_tokens = options["max_model_len"]
    if sizes is not None:
        kv_blocks = kv_blocks or sizes.kv_blocks * sizes.block_tokens // block_tokens
        max_model_len_tokens = max_model_len_tokens or min(sizes.max_model_len_tokens, kv_blocks * block_tokens)
    return InstanceConfig(
        block_tokens=block_tokens,
        kv_blocks=kv_blocks or _KV_BLOCKS,
        max_model_len_tokens=max_model_len_tokens or _MAX_MODEL_LEN_TOKENS,
        max_batch_requests=options["max_num_seqs"],
        max_step_tokens=options["max_num_batched_tokens"],
        block_bytes=block_tokens if sizes is None else sizes.block_bytes // sizes.block_tokens * block_tokens,
    )
