"""Three runs of vLLM 0.19 on RTX PRO 6000 cards, 300 ShareGPT requests each, against their simulation.

Step costs come from kernel tables of the same cards, which hold no request and no schedule. What the tables leave
open is not fitted to the runs: see docs/cost_models.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from controlplane.policies.round_robin import RoundRobin
from simulator.cluster.config import ClusterConfig
from simulator.cluster.simulation import ClusterSimulation
from simulator.cost.catalogue import DEVICES, MODELS, instance_for
from simulator.cost.fitted.table_cost import TableCost
from simulator.cost.roofline.attention import decode_attention
from simulator.instance.config import InstanceConfig
from simulator.profiles.folder import ProfileFolder
from simulator.profiles.kernel_tables import DEVICE, kernel_tables
from simulator.report.outcome import RequestOutcome
from simulator.traces.request import TraceRequest
from simulator.validation.case import Case
from simulator.validation.latencies import MeanLatencies
from simulator.validation.lockstep import run_in_lockstep

MAX_BATCH_REQUESTS = 128
"""max_num_seqs of the runs; their other limits are vLLM's defaults."""
GRAPH_TOKENS = 256
"""vLLM captures graphs for batches of up to twice max_num_seqs."""


@dataclass(frozen=True, slots=True)
class EngineRun:
    """How one of the runs was set up."""

    name: str
    """Name of the run in the tables."""
    model: str
    """Name of the model in the catalogue."""
    tensor_parallel: int = 1
    data_parallel: int = 1
    """Engines with requests of their own that share their experts."""


RUNS = (
    EngineRun("Llama-3.1-8B", "Llama-3.1-8B"),
    EngineRun("Qwen3-32B", "Qwen3-32B", tensor_parallel=2),
    EngineRun("Qwen3-30B-A3B-Instruct-2507", "Qwen3-30B-A3B", data_parallel=2),
)


def engine_run_cases(folder: ProfileFolder, run: EngineRun) -> list[Case]:
    """Mean TTFT, TPOT and end-to-end latency of one of `RUNS`."""
    rows = [row for row in folder.rows("vllm_measured_requests_RTXPRO6000") if row["model"] == run.name]
    requests, measured = measured_run(rows)
    simulated = simulate_run(folder, run, requests)
    return MeanLatencies.of(measured).cases(f"vllm/{run.name}/{DEVICE}", MeanLatencies.of(simulated))


def measured_run(rows: Sequence[dict[str, str]]) -> tuple[list[TraceRequest], list[RequestOutcome]]:
    """Requests and what became of them, in order of arrival.

    Arrivals are on the client's clock, everything later on the engine's. The request that was queued the fastest
    shows how far the clocks are apart.
    """
    rows = sorted(rows, key=lambda row: float(row["arrival_time"]))
    ahead_s = max(float(row["arrival_time"]) - float(row["queued_ts"]) for row in rows)
    start_s = float(rows[0]["arrival_time"])
    requests, outcomes = [], []
    for row in rows:
        arrival_s = float(row["arrival_time"]) - start_s
        request = TraceRequest(arrival_s, int(row["input_toks"]), int(row["output_toks"]))
        last_s = float(row["last_token_ts"]) + ahead_s - start_s
        requests.append(request)
        outcomes.append(
            RequestOutcome(
                arrival_s=arrival_s,
                finished_s=last_s,
                first_token_s=float(row["first_token_ts"]) + ahead_s - start_s,
                last_token_s=last_s,
                input_tokens=request.input_tokens,
                output_tokens=request.output_tokens,
            )
        )
    return requests, outcomes


def simulate_run(folder: ProfileFolder, run: EngineRun, requests: Sequence[TraceRequest]) -> list[RequestOutcome]:
    """Simulate the requests of a measured run, at the same arrival times."""
    tables = kernel_tables(folder, run.model, run.tensor_parallel, run.data_parallel)
    uneven = decode_attention(MODELS[run.model], DEVICES[DEVICE], run.tensor_parallel)
    cost = TableCost(tables, uneven, graph_tokens=GRAPH_TOKENS)
    if run.data_parallel > 1:
        return run_in_lockstep(requests, run.data_parallel, _sizes(run), cost.lockstep_ms)
    config = ClusterConfig(instances=1, instance=_sizes(run), report_interval_ms=0, report_delay_ms=0)
    return ClusterSimulation(requests, config, cost, RoundRobin()).run()


def _sizes(run: EngineRun) -> InstanceConfig:
    """Engines that share experts hold their halves, but each keeps the whole KV of its own requests."""
    devices = run.tensor_parallel * run.data_parallel
    sizes, _ = instance_for(run.model, DEVICE, devices, max_batch_requests=MAX_BATCH_REQUESTS)
    kv_blocks = sizes.kv_blocks // run.data_parallel
    return replace(
        sizes,
        kv_blocks=kv_blocks,
        max_model_len_tokens=min(sizes.max_model_len_tokens, kv_blocks * sizes.block_tokens),
    )
