"""TensorRT-LLM's published maximum throughput against the roofline model, none of whose constants it gave.

The published runs queue all requests at once and report output tokens per second; batch and step limits are the
benchmark's defaults, requests are admitted only if prompt and answer fit (its scheduler never evicts), weights are
in the row's precision and KV in fp8, as in the checkpoints that were measured.
"""

from dataclasses import dataclass, replace
from statistics import median

from mesh.errors import ConfigurationError
from simulator.cost.catalogue import instance_for
from simulator.instance.counted_request import CountedRequest
from simulator.instance.instance import SimulatedInstance
from simulator.profiles.folder import ProfileFolder
from simulator.validation.case import Case

METRIC = "output_tokens_per_s"
MEDIAN_METRIC = "median_abs_error_output_tokens_per_s"
MAX_BATCH_REQUESTS = 2048
MAX_STEP_TOKENS = 8192
MEMORY_UTILISATION = 0.95
_BLOCK_TOKENS = 64
_REQUESTS = {(128, 128): 6000, (128, 2048): 3000, (500, 2000): 3000, (1000, 1000): 3000, (2048, 128): 3000}
"""As published, by input and output length, but for 128/128, where 30,000 only prolong the steady state."""
_OTHER_REQUESTS = 1500
_LONG_REQUESTS = 1000
_LONG_TOKENS = 20_000
_LONGEST_RUN_STEPS = 4096


@dataclass(frozen=True, slots=True)
class ThroughputRow:
    """One published throughput of TensorRT-LLM: a model on a device, with fixed input and output lengths."""

    model: str
    device: str
    tensor_parallel: int
    precision: str
    input_tokens: int
    output_tokens: int
    tokens_per_s: float

    @property
    def name(self) -> str:
        """Name of the validation case."""
        return (
            f"tensorrt-llm/{self.model}/{self.device}/tp{self.tensor_parallel}/{self.precision}/"
            f"{self.input_tokens}-{self.output_tokens}"
        )

    @property
    def requests(self) -> int:
        """Number of requests that were queued for the published run."""
        if self.input_tokens >= _LONG_TOKENS:
            return _LONG_REQUESTS
        return _REQUESTS.get((self.input_tokens, self.output_tokens), _OTHER_REQUESTS)


def throughput_rows(folder: ProfileFolder) -> list[ThroughputRow]:
    """All published rows, of the table `trtllm_v1.0_max_throughput`."""
    return [
        ThroughputRow(
            row["model"],
            row["gpu"],
            int(row["tp"]),
            row["precision"].lower(),
            int(row["isl"]),
            int(row["osl"]),
            float(row["max_output_tokens_per_s"]),
        )
        for row in folder.rows("trtllm_v1.0_max_throughput")
    ]


def throughput_case(row: ThroughputRow) -> Case:
    """One row. Raises `ConfigurationError` where the catalogue lacks the model or the device."""
    return Case.of(row.name, METRIC, row.tokens_per_s, _simulated_tokens_per_s(row))


def summary(cases: list[Case]) -> Case:
    """The median over rows: of what was measured, of what was simulated, and of the absolute errors."""
    rows = [case for case in cases if case.metric == METRIC]
    if not rows:
        raise ConfigurationError("there is no throughput row to take a median of")
    return Case(
        "tensorrt-llm",
        MEDIAN_METRIC,
        median(case.measured for case in rows),
        median(case.simulated for case in rows),
        median(abs(case.error) for case in rows),
    )


def _simulated_tokens_per_s(row: ThroughputRow) -> float:
    sizes, cost = instance_for(
        row.model,
        row.device,
        row.tensor_parallel,
        weight_dtype=row.precision,
        kv_element_bytes=1.0,
        memory_utilisation=MEMORY_UTILISATION,
        block_tokens=_BLOCK_TOKENS,
        max_batch_requests=MAX_BATCH_REQUESTS,
        max_step_tokens=MAX_STEP_TOKENS,
        max_queued_requests=row.requests,
    )
    total = row.input_tokens + row.output_tokens
    fit = sizes.kv_blocks // -(-total // _BLOCK_TOKENS)
    if not fit:
        raise ConfigurationError(f"{row.name}: not one request fits into the KV that memory leaves")
    instance = SimulatedInstance(replace(sizes, max_batch_requests=min(MAX_BATCH_REQUESTS, fit)), cost)
    for number in range(row.requests):
        instance.submit(CountedRequest(str(number), row.input_tokens, row.output_tokens))
    now_ms = 0.0
    while step := instance.plan_step(now_ms, _LONGEST_RUN_STEPS):
        instance.finish_step(step)
        now_ms = step.ends_ms
    return row.requests * row.output_tokens / now_ms * 1000
