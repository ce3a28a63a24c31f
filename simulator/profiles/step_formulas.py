"""Whole steps as published: DistServe's fitted formulas and Splitwise's measured prompt and token times."""

from collections import defaultdict
from dataclasses import dataclass
from statistics import median

from controlplane.planning.instance_profile import StepCoefficients
from mesh.errors import ConfigurationError
from simulator.cost.fitted.interpolation import Curve
from simulator.cost.fitted.step_cost import FittedStepCost
from simulator.cost.model import BatchShape, CostModel
from simulator.profiles.folder import ProfileFolder

_DISTSERVE_NAMES = {"OPT-13B": "facebook/opt-13b", "OPT-66B": "facebook/opt-66b"}
_SPLITWISE_DEVICES = {"A100-80G": "a100-80gb", "H100": "h100-80gb"}
_PROMPT_TOKENS, _ANSWER_TOKENS = 512, 128


@dataclass(frozen=True, slots=True)
class TwoSizesCost(CostModel):
    """One formula for small decode batches, another for large ones."""

    small: FittedStepCost
    large: FittedStepCost
    largest_small: int

    def step_ms(self, batch: BatchShape) -> float:
        return (self.small if batch.decode_requests <= self.largest_small else self.large).step_ms(batch)


def distserve_cost(folder: ProfileFolder, model: str, device: str, tensor_parallel: int) -> TwoSizesCost:
    """prefill = a + b sum n + c sum n^2, decode = a + b sum L + c requests, on an A100 (its own engine).

    A coefficient that was fitted below 0 counts as 0. Raises `ConfigurationError` where it was not measured.
    """
    fits = folder.document("distserve_a100_profile")["profiler-a100-80g.distserve.json"]
    found = fits.get(_DISTSERVE_NAMES.get(model, ""), {}).get(str(tensor_parallel))
    if found is None or device != "A100-80G":
        raise ConfigurationError(f"DistServe's profile has no {model} on {tensor_parallel} {device}")
    prefill = [max(0.0, value) for value in found["prefill"]]

    def cost(decode: list[float]) -> FittedStepCost:
        fixed_ms, context_token_ms, request_ms = (max(0.0, value) for value in decode)
        return FittedStepCost(
            StepCoefficients(
                fixed_ms=fixed_ms,
                prefill_step_ms=max(0.0, prefill[0] - fixed_ms),
                prefill_token_ms=prefill[1],
                attended_pair_ms=2 * prefill[2],
                decode_request_ms=request_ms,
                context_token_ms=context_token_ms,
            )
        )

    return TwoSizesCost(
        cost(found["decoding_smallbs"]), cost(found["decoding_largebs"]), found["decoding_large_small_bs_threshold"]
    )


@dataclass(frozen=True, slots=True)
class PromptAndTokenCost(CostModel):
    """Prompt time over a step's prompt tokens, and token time over its decoding requests; both where it has both."""

    prompt: Curve
    token: Curve

    def step_ms(self, batch: BatchShape) -> float:
        new_tokens = sum(chunk.new_tokens for chunk in batch.prefill)
        prompt_ms = self.prompt.at(new_tokens) if new_tokens else 0.0
        return prompt_ms + (self.token.at(batch.decode_requests) if batch.decode_requests else 0.0)


def splitwise_cost(folder: ProfileFolder, model: str, device: str, tensor_parallel: int) -> PromptAndTokenCost:
    """Contexts other than 512 to 640 tokens are not in it. Raises `ConfigurationError` where it was not measured."""
    rows = [
        row
        for row in folder.rows("splitwise_perf_model")
        if model == "Llama-2-70B"
        and row["model"] == "llama2-70b"
        and row["hardware"] == _SPLITWISE_DEVICES.get(device)
        and int(row["tensor_parallel"]) == tensor_parallel
    ]
    if not rows:
        raise ConfigurationError(f"Splitwise's table has no {model} on {tensor_parallel} {device}")
    return PromptAndTokenCost(
        _medians(rows, "prompt_size", "prompt_time", batch_size=1, token_size=_ANSWER_TOKENS),
        _medians(rows, "batch_size", "token_time", prompt_size=_PROMPT_TOKENS, token_size=_ANSWER_TOKENS),
    )


def _medians(rows: list[dict[str, str]], axis: str, value: str, **fixed: int) -> Curve:
    values: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        if all(int(row[name]) == wanted for name, wanted in fixed.items()):
            values[int(row[axis])].append(float(row[value]))
    return Curve(tuple(sorted(values)), tuple(median(values[point]) for point in sorted(values)))
