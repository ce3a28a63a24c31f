"""Splitwise's measured prompt and token times of Llama-2-70B against single steps of the roofline model.

They were measured on the software of 2023, whose host launched every kernel while the device waited: on four and
eight devices a token takes 45 ms (A100) or 30 ms (H100) whatever the batch, so two devices are compared alone.
"""

from collections import defaultdict
from statistics import median

import numpy as np

from simulator.cost.catalogue import instance_for
from simulator.cost.model import BatchShape, CostModel, PrefillChunk
from simulator.profiles.folder import ProfileFolder
from simulator.validation.case import Case

_DEVICES = {"a100-80gb": "A100-80G", "h100-80gb": "H100"}
"""Those of the table that were measured without a power cap."""
_MODEL = "llama2-70b"
_CATALOGUE_MODEL = "Llama-2-70B"
_DEGREE = 2
_PROMPT_TOKENS, _ANSWER_TOKENS = 512, 128
"""Of the requests whose batch size is varied."""


def single_step_cases(folder: ProfileFolder) -> list[Case]:
    """Prompt time over its length, and time between tokens over the batch, for each device."""
    rows = [row for row in folder.rows("splitwise_perf_model") if row["model"] == _MODEL]
    cases: list[Case] = []
    for published, device in _DEVICES.items():
        mine = [row for row in rows if row["hardware"] == published and int(row["tensor_parallel"]) == _DEGREE]
        _, cost = instance_for(_CATALOGUE_MODEL, device, _DEGREE)
        name = f"splitwise/{_CATALOGUE_MODEL}/{device}/tp{_DEGREE}"
        prompts = _medians(mine, "prompt_size", "prompt_time", batch_size=1, token_size=_ANSWER_TOKENS)
        batches = _medians(mine, "batch_size", "token_time", prompt_size=_PROMPT_TOKENS, token_size=_ANSWER_TOKENS)
        cases += [Case.of(name, f"prompt_{size}_ms", ms, _prompt_ms(cost, size)) for size, ms in prompts.items()]
        cases += [Case.of(name, f"token_batch_{size}_ms", ms, _token_ms(cost, size)) for size, ms in batches.items()]
    return cases


def _medians(rows: list[dict[str, str]], axis: str, value: str, **fixed: int) -> dict[int, float]:
    values: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        if all(int(row[name]) == wanted for name, wanted in fixed.items()):
            values[int(row[axis])].append(float(row[value]))
    return {point: median(values[point]) for point in sorted(values)}


def _prompt_ms(cost: CostModel, tokens: int) -> float:
    return cost.step_ms(BatchShape((PrefillChunk(tokens, 0),)))


def _token_ms(cost: CostModel, requests: int) -> float:
    context = _PROMPT_TOKENS + _ANSWER_TOKENS // 2
    contexts = np.full(requests, context, dtype=np.int64)
    return cost.step_ms(BatchShape(decode_context_tokens=contexts, decode_context_tokens_sum=context * requests))
