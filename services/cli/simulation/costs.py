"""The options that say what a simulated instance is: which model on which device, and what its steps cost."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from controlplane.planning.instance_profile import InstanceProfile
from mesh.errors import ConfigurationError
from services.cli.profiling.profile_file import read_profile
from simulator.cost.catalogue import DEVICES, MODELS, deployment_for, instance_for
from simulator.cost.fitted.step_cost import FittedStepCost, profiled_instance
from simulator.cost.linear import LinearCost
from simulator.cost.model import CostModel
from simulator.cost.spec.model import WEIGHT_BYTES
from simulator.instance.config import InstanceConfig
from simulator.profiles.choice import SOURCES, cost_from_tables
from simulator.profiles.folder import ProfileFolder

_KV_BLOCKS = 26_000
_MAX_MODEL_LEN_TOKENS = 131_072
_KV_BYTES_OF_A_TOKEN = 131_072
"""Of an 8B Llama: 32 layers, keys and values, 8 heads of 128 in bf16."""
_MAX_NUM_SEQS = 256
_MAX_NUM_BATCHED_TOKENS = 2048
_BLOCK_TOKENS = 16

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
        "--tables",
        "tables_path",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Folder of published measurements: take the costs of --model on --device from there.",
    ),
    click.option(
        "--tables-of",
        "tables_source",
        type=click.Choice(list(SOURCES)),
        show_default="the first that has the model on the device",
        help="Whose tables.",
    ),
    click.option(
        "--profile",
        "profile_path",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Costs and sizes of an instance that penstock profile has measured, in place of --model and --device.",
    ),
    click.option(
        "--levelled-attention",
        is_flag=True,
        help="Let decode attention cost what equal lengths of the same total would: an ablation.",
    ),
)


@dataclass(frozen=True, slots=True)
class CostChoice:
    """The source of a simulation's step costs: a profile, tables, or the roofline model of a device."""

    model: str | None = None
    device: str | None = None
    tensor_parallel: int = 1
    weight_dtype: str = ""
    heterogeneity: bool = True
    profile: InstanceProfile | None = None
    tables: Path | None = None
    tables_source: str = ""

    def __post_init__(self) -> None:
        if self.tables is not None and self.model is None:
            raise ConfigurationError("--tables needs --model and --device: it says only where their costs come from")
        if self.profile is not None and self.model is not None:
            raise ConfigurationError("--profile has its own model and device: give it without --model and --device")
        if (self.model is None) != (self.device is None):
            raise ConfigurationError("--model and --device go together: costs follow from both")
        if idle := self._idle_options():
            raise ConfigurationError(f"{idle} would change nothing here: {self._where_costs_come_from()}")

    def _idle_options(self) -> str:
        """Those given that have no say in these costs."""
        catalogue = self.model is not None
        roofline = catalogue and self.tables is None
        given = {
            "--tp": self.tensor_parallel != 1 and not catalogue,
            "--weights": bool(self.weight_dtype) and not catalogue,
            "--levelled-attention": not self.heterogeneity and not roofline,
            "--tables-of": bool(self.tables_source) and self.tables is None,
        }
        return ", ".join(option for option, is_idle in given.items() if is_idle)

    def _where_costs_come_from(self) -> str:
        if self.profile is not None:
            return "the costs are those that --profile has measured"
        if self.tables is not None:
            return "the costs are those of --tables"
        if self.model is not None:
            return "the costs are derived from --model and --device; --tables names a folder of measured ones"
        return "without --model and --device the costs are those of an 8B model on an A100"

    def create(self) -> CostModel:
        """The cost model. Raises `ConfigurationError`."""
        if self.profile is not None:
            return FittedStepCost(self.profile.step.coefficients)
        if self.model is None or self.device is None:
            return LinearCost()
        if self.tables is not None:
            named = deployment_for(self.model, self.device, self.tensor_parallel)
            folder = ProfileFolder(self.tables)
            return cost_from_tables(
                folder, named.model.name, named.device.name, self.tensor_parallel, self.tables_source
            )
        return self._instance()[1]

    def sizes(self) -> InstanceConfig | None:
        """What the device has room for, or the profiled instance had; None where nothing says."""
        if self.profile is not None:
            return profiled_instance(self.profile.sizes)
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
    """The cost model that a command's options choose. Raises `ConfigurationError` for a profile that cannot be read."""
    return CostChoice(
        options["model"],
        options["device"],
        options["tp"],
        options["weight_dtype"] or "",
        not options["levelled_attention"],
        read_profile(options["profile_path"]) if options["profile_path"] else None,
        options["tables_path"],
        options["tables_source"] or "",
    )


def instance_of(options: dict[str, Any]) -> InstanceConfig:
    """Sizes as the options say, and what they leave open from the profile or the catalogue. Raises
    `ConfigurationError`."""
    costs = costs_of(options)
    sizes = costs.sizes()
    profiled = sizes if costs.profile is not None else None
    block_tokens = options["block_tokens"] or (profiled.block_tokens if profiled else _BLOCK_TOKENS)
    kv_blocks = options["kv_blocks"]
    max_model_len_tokens = options["max_model_len"]
    if sizes is not None:
        kv_blocks = kv_blocks or sizes.kv_blocks * sizes.block_tokens // block_tokens
        max_model_len_tokens = max_model_len_tokens or min(sizes.max_model_len_tokens, kv_blocks * block_tokens)
    return InstanceConfig(
        block_tokens=block_tokens,
        kv_blocks=kv_blocks or _KV_BLOCKS,
        max_model_len_tokens=max_model_len_tokens or _MAX_MODEL_LEN_TOKENS,
        max_batch_requests=options["max_num_seqs"] or (profiled.max_batch_requests if profiled else _MAX_NUM_SEQS),
        max_step_tokens=options["max_num_batched_tokens"]
        or (profiled.max_step_tokens if profiled else _MAX_NUM_BATCHED_TOKENS),
        block_bytes=block_tokens * (_KV_BYTES_OF_A_TOKEN if sizes is None else sizes.block_bytes // sizes.block_tokens),
    )
