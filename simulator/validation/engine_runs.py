"""Measured runs of vLLM against their simulation, on whichever cards a folder has runs and kernel tables of.

vllm_measured_requests_CARD.csv.gz holds the requests, vllm_measured_meta_CARD.json.gz how the engines were set up, both
by the name of the run. Step costs come from kernel tables of the same card, which hold no request and no schedule. What
the tables leave open is not fitted to the runs: see docs/cost_models.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from controlplane.policies.round_robin import RoundRobin
from mesh.errors import ConfigurationError
from simulator.cluster.config import ClusterConfig
from simulator.cluster.simulation import ClusterSimulation
from simulator.cost.catalogue import DEVICES, MODELS, instance_for
from simulator.cost.fitted.table_cost import TableCost
from simulator.instance.config import InstanceConfig
from simulator.profiles.choice import unevenness_of
from simulator.profiles.folder import ProfileFolder
from simulator.profiles.kernel_tables import card_of, kernel_tables
from simulator.report.outcome import RequestOutcome
from simulator.traces.request import TraceRequest
from simulator.validation.case import Case
from simulator.validation.latencies import MeanLatencies
from simulator.validation.lockstep import run_in_lockstep

_REQUESTS = "vllm_measured_requests_"
_META = "vllm_measured_meta_"
_GRAPH_TOKENS = 512
"""vLLM's largest captured graph, unless batches are smaller: graphs are captured for up to twice max_num_seqs."""


@dataclass(frozen=True, slots=True)
class EngineRun:
    """How one of the runs was set up."""

    name: str
    """Name of the run in the tables."""
    model: str
    """Name of the model in the catalogue."""
    device: str
    """Name of the card in the catalogue."""
    tensor_parallel: int = 1
    data_parallel: int = 1
    """Engines with requests of their own that share their experts."""
    max_batch_requests: int = 256
    max_step_tokens: int = 2048
    kv_tokens: int | None = None
    """Tokens that the KV of one engine holds, as it reported itself ("GPU KV cache size"); None: as estimated from the
    memory of the card."""

    @property
    def case_name(self) -> str:
        """As it is shown."""
        return f"vllm/{self.name}/{self.device}"


def engine_runs(folder: ProfileFolder, kv_tokens: Mapping[str, int] = MappingProxyType({})) -> list[EngineRun]:
    """All runs of the folder. `kv_tokens`: what engines reported and the folder does not say, by MODEL or MODEL/DEVICE.

    Raises `ConfigurationError` for a card or a model that the catalogue lacks, and for a name in `kv_tokens` that no
    run has.
    """
    runs: list[EngineRun] = []
    for card in folder.names(_REQUESTS):
        device = next((name for name in DEVICES if card_of(name).lower() == card.lower()), None)
        if device is None:
            raise ConfigurationError(
                f"{_REQUESTS}{card} is of a card that the catalogue lacks; it has {', '.join(map(card_of, DEVICES))}"
            )
        for name, meta in sorted(folder.document(f"{_META}{card}").items()):
            runs.append(_run(name, device, meta, kv_tokens))
    if not runs:
        raise ConfigurationError(f"{folder.path} has no measured runs ({_REQUESTS}CARD.csv.gz)")
    names = {name for run in runs for name in (run.name, f"{run.name}/{run.device}")}
    if unknown := sorted(set(kv_tokens) - names):
        raise ConfigurationError(f"no run is called {', '.join(unknown)}; there are {', '.join(sorted(names))}")
    return runs


def _run(name: str, device: str, meta: Mapping[str, Any], kv_tokens: Mapping[str, int]) -> EngineRun:
    try:
        arguments = meta["engine_kwargs"]
        blocks = meta.get("num_gpu_blocks")
        return EngineRun(
            name=name,
            model=_model_of(name),
            device=device,
            tensor_parallel=int(arguments["tensor_parallel_size"]),
            data_parallel=int(arguments["data_parallel_size"]),
            max_batch_requests=int(arguments["max_num_seqs"]),
            max_step_tokens=int(arguments["max_num_batched_tokens"]),
            kv_tokens=kv_tokens.get(f"{name}/{device}")
            or kv_tokens.get(name)
            or (None if blocks is None else int(blocks) * int(meta.get("block_size", 16))),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"the run {name} on {device} does not say how it was set up: {error!r}") from error


def _model_of(name: str) -> str:
    """The catalogue's name of a run's model: the run may have a variant of it (-Instruct and a date)."""
    known = [model for model in MODELS if name.lower() == model.lower() or name.lower().startswith(f"{model.lower()}-")]
    if not known:
        raise ConfigurationError(f"the run {name} is of a model that the catalogue lacks; it has {', '.join(MODELS)}")
    return max(known, key=len)


def engine_run_cases(folder: ProfileFolder, run: EngineRun) -> list[Case]:
    """Mean TTFT, TPOT and end-to-end latency of a run."""
    rows = [row for row in folder.rows(_REQUESTS + card_of(run.device)) if row["model"] == run.name]
    requests, measured = measured_run(rows)
    simulated = simulate_run(folder, run, requests)
    return MeanLatencies.of(measured).cases(run.case_name, MeanLatencies.of(simulated))


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
    tables = kernel_tables(folder, run.model, run.device, run.tensor_parallel, run.data_parallel)
    uneven = unevenness_of(run.model, run.device, run.tensor_parallel)
    cost = TableCost(tables, uneven, graph_tokens=min(_GRAPH_TOKENS, 2 * run.max_batch_requests))
    if run.data_parallel > 1:
        return run_in_lockstep(requests, run.data_parallel, _sizes(run), cost.lockstep_ms)
    config = ClusterConfig(instances=1, instance=_sizes(run), report_interval_ms=0, report_delay_ms=0)
    return ClusterSimulation(requests, config, cost, RoundRobin()).run()


def _sizes(run: EngineRun) -> InstanceConfig:
    """Engines that share experts hold their halves, but each keeps the whole KV of its own requests."""
    devices = run.tensor_parallel * run.data_parallel
    sizes, _ = instance_for(
        run.model,
        run.device,
        devices,
        max_batch_requests=run.max_batch_requests,
        max_step_tokens=run.max_step_tokens,
    )
    kv_blocks = sizes.kv_blocks // run.data_parallel
    if run.kv_tokens is not None:
        kv_blocks = run.kv_tokens // sizes.block_tokens
    longest = MODELS[run.model].max_context_tokens
    return replace(sizes, kv_blocks=kv_blocks, max_model_len_tokens=min(longest, kv_blocks * sizes.block_tokens))
