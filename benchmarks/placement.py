"""CPU time of a placement decision, and bytes of the prefix index.

    python -m benchmarks.placement --json OUT

A decision is what `controlplane.policies.place.place` does: a fresh snapshot (load reports keep arriving between
decisions), the walk of the prompt's chain through the index, the policy, and the correction for the request placed,
which the instance's next report takes back: it has admitted the request. Hashing the prompt is not in it. Prompts have
2048 tokens in blocks of 16 tokens. CPU time of the thread, because such machines are shared; a machine's other load
still shows through its caches.

Three kinds of prompt: `hit` (the whole chain of 128 blocks is held: a system prompt of 32 blocks by every
instance, the rest by one or two), `system` (only the system prompt is held), `cold` (nothing is held).

Four kinds of KV: `own` (instances compute what they have not cached), `pulled` (or pull it from each other),
`host` (or load it from their hosts, which hold half of the conversations, eight instances to a host), `moved` (and may
decode elsewhere than they prefill: their costs were measured).
"""

import json
import platform
import statistics
import sys
import time
import tracemalloc
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import click
import numpy as np

from controlplane.model.cluster import ClusterTable
from controlplane.model.cluster_limits import ClusterLimits
from controlplane.model.instance import InstanceDescription, InstanceState, KvBlocks, KvTier, LoadReport
from controlplane.model.kv_costs import datasheet_kv_costs
from controlplane.model.placement import Placement, PlacementRequest
from controlplane.model.prefix_index import PrefixIndex
from controlplane.model.step_costs import DATASHEET_COSTS
from controlplane.policies.interface import Policy
from controlplane.policies.lmetric_plus import LMetricPlus
from controlplane.policies.penstock import Penstock
from controlplane.policies.place import place
from controlplane.policies.registry import OWN_POLICIES, create_policy

MODEL = "benchmark"
BLOCK_TOKENS = 16
PROMPT_BLOCKS = 128
SYSTEM_BLOCKS = 32
SYSTEM_PROMPTS = 50
SHARED_CONVERSATIONS = 0.2
"""Fraction of conversations that two instances hold."""
HOST_KV = ("host", "moved")
ON_HOSTS = 0.5
"""Fraction of conversations that a host holds."""
HOST_INSTANCES = 8
REPORTS_BETWEEN_DECISIONS = 10
"""256 instances at a report each 50 ms beside 500 requests a second."""
SWEEP_PLACES = 4096
BOUND_CPU_US = 50.0
BOUND_BYTES = 200.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Medians over the runs; a run's own median and 99th percentile are over its decisions."""

    instances: int
    policy: str
    kv: str
    prompt: str
    median_cpu_us: float
    p99_cpu_us: float
    median_cpu_us_per_run: list[float]


class Cluster:
    """A table of `instances` instances with `blocks` distinct blocks indexed."""

    def __init__(self, instances: int, blocks: int, seed: int, kv: str = "own") -> None:
        self.kv = kv
        self.random = np.random.default_rng(seed)
        self.table = ClusterTable(ClusterLimits(max_indexed_blocks=2 * blocks))
        self.ids = [f"instance-{number:04d}" for number in range(instances)]
        for instance_id in self.ids:
            self.table.joined(description(instance_id))
            if kv != "own":
                costs = datasheet_kv_costs(0, pulls=True, loads=kv in HOST_KV)
                self.table.kv_costed(instance_id, "1", costs)
            if kv == "moved":
                self.table.costed(instance_id, "1", DATASHEET_COSTS)
        self.system_prompts = [self.chain(SYSTEM_BLOCKS) for _ in range(SYSTEM_PROMPTS)]
        for instance_id in self.ids:
            for system_prompt in self.system_prompts:
                self.table.cached(instance_id, "1", KvBlocks(stored=tuple(system_prompt)))
        self.conversations: list[list[int]] = []
        while len(self.table.index) < blocks:
            self._converse()
        self.decisions = 0
        self._placed: dict[str, list[str]] = {}
        """Requests by the instance whose next report admits them."""
        self.reports_apply_ns: list[int] = []
        self.report(rounds=instances)

    def chain(self, blocks: int) -> list[int]:
        return [int(value) for value in self.random.integers(0, 2**64, blocks, np.uint64)]

    def _converse(self) -> None:
        system_prompt = self.system_prompts[self.random.integers(SYSTEM_PROMPTS)]
        tail = self.chain(PROMPT_BLOCKS - SYSTEM_BLOCKS)
        holders = 2 if self.random.random() < SHARED_CONVERSATIONS else 1
        for instance in self.random.integers(len(self.ids), size=holders):
            self.table.cached(self.ids[instance], "1", KvBlocks(stored=tuple(tail)))
        if self.kv in HOST_KV and self.random.random() < ON_HOSTS:
            self._save([*system_prompt, *tail])
        self.conversations.append([*system_prompt, *tail])

    def _save(self, chain: list[int]) -> None:
        """A host has the chain, as all of its instances tell."""
        first = int(self.random.integers(len(self.ids))) // HOST_INSTANCES * HOST_INSTANCES
        for instance_id in self.ids[first : first + HOST_INSTANCES]:
            self.table.cached(instance_id, "1", KvBlocks(stored=tuple(chain), tier=KvTier.HOST))

    def report(self, rounds: int) -> None:
        """Load reports of `rounds` instances."""
        for row in self.random.integers(len(self.ids), size=rounds).tolist():
            admitted = self._placed.pop(self.ids[row], ())
            load = LoadReport(
                running_requests=int(self.random.integers(1, 40)),
                queued_requests=int(self.random.integers(4)),
                queued_prefill_tokens=int(self.random.integers(8000)),
                running_tokens=int(self.random.integers(50_000)),
            )
            start_ns = time.thread_time_ns()
            self.table.reported(self.ids[row], "1", load, InstanceState.READY, admitted)
            self.reports_apply_ns.append(time.thread_time_ns() - start_ns)
            for request_id in admitted:
                self.table.ended(request_id)

    def request(self, prompt: str) -> PlacementRequest:
        """The next one; 500 come in a second."""
        self.decisions += 1
        name, now_s = f"r{self.decisions}", self.decisions / 500
        return PlacementRequest(name, MODEL, BLOCK_TOKENS * PROMPT_BLOCKS, now_s, self.prompt(prompt))

    def placed(self, placement: Placement) -> None:
        """The instance admits the request before its next report."""
        self._placed.setdefault(placement.instance.instance_id, []).append(placement.request.request_id)

    def prompt(self, kind: str) -> list[int]:
        """Fresh int objects, as they come off the wire: nothing of the chain is in the processor's caches."""
        chain = self.conversations[self.random.integers(len(self.conversations))]
        if kind == "system":
            chain = [*chain[:SYSTEM_BLOCKS], *self.chain(PROMPT_BLOCKS - SYSTEM_BLOCKS)]
        elif kind == "cold":
            chain = self.chain(PROMPT_BLOCKS)
        return [int(value) for value in np.array(chain, np.uint64)]


def description(instance_id: str) -> InstanceDescription:
    return InstanceDescription(
        instance_id, "1", "127.0.0.1:1", MODEL, "", "simulated", BLOCK_TOKENS, 8192, 32_768, 256, 2048
    )


def decision_cpu_us(cluster: Cluster, policy: Policy, prompt: str, decisions: int) -> np.ndarray:
    taken_ns = np.empty(decisions, np.int64)
    for number in range(decisions):
        cluster.report(REPORTS_BETWEEN_DECISIONS)
        request = cluster.request(prompt)
        start_ns = time.thread_time_ns()
        placement = place(cluster.table, policy, request, asks_later=cluster.kv == "moved")
        taken_ns[number] = time.thread_time_ns() - start_ns
        cluster.placed(placement)
    return taken_ns / 1000


def time_decisions(cluster: Cluster, policy: str, prompt: str, runs: int, decisions: int) -> Timing:
    medians, tails = [], []
    for _ in range(runs):
        taken = decision_cpu_us(cluster, create_policy(policy), prompt, decisions)
        medians.append(float(np.median(taken)))
        tails.append(float(np.percentile(taken, 99)))
    return Timing(
        len(cluster.ids), policy, cluster.kv, prompt, statistics.median(medians), statistics.median(tails), medians
    )


def time_kv(blocks: int, runs: int, decisions: int, seed: int) -> list[Timing]:
    """Of 256 instances that can bring KV: what the options add to a decision."""
    return [
        time_decisions(cluster, policy, prompt, runs, decisions)
        for cluster in (Cluster(256, blocks, seed, kv) for kv in ("own", "pulled", *HOST_KV))
        for policy in (LMetricPlus.name, Penstock.name)
        for prompt in ("hit", "system")
    ]


def index_memory(blocks: int, seed: int) -> dict[str, float]:
    """Bytes allocated by an index for twice as many blocks as it holds in the end, each held by one instance of 256."""
    random = np.random.default_rng(seed)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index = PrefixIndex(2 * blocks)
    slots = [index.add_instance() for _ in range(256)]
    for number in range(blocks // PROMPT_BLOCKS):
        index.store(slots[number % 256], random.integers(0, 2**64, PROMPT_BLOCKS, np.uint64).tolist())
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return {"blocks": len(index), "max_blocks": index.max_blocks, "bytes_per_block": held / len(index)}


def update_cpu_us(cluster: Cluster) -> dict[str, float]:
    """CPU per block of a KV update of one block and of 128."""
    taken: dict[str, float] = {}
    for size in (1, PROMPT_BLOCKS):
        chains = [tuple(cluster.chain(size)) for _ in range(20_000 // size)]
        for kind, updates in (
            ("store", [KvBlocks(stored=chain) for chain in chains]),
            ("remove", [KvBlocks(removed=chain) for chain in chains]),
        ):
            start_ns = time.thread_time_ns()
            for update in updates:
                cluster.table.cached(cluster.ids[0], "1", update)
            taken[f"{kind}_{size}"] = (time.thread_time_ns() - start_ns) / 1000 / (size * len(chains))
    return taken


def sweep_cpu_ms(cluster: Cluster) -> dict[str, float]:
    """An instance dies: the sweep of its blocks, slice by slice."""
    cluster.table.lost(cluster.ids.pop(), "1")
    slices_ms: list[float] = []
    more = True
    while more:
        start_ns = time.thread_time_ns()
        more = cluster.table.index.sweep(SWEEP_PLACES)
        slices_ms.append((time.thread_time_ns() - start_ns) / 1e6)
    return {
        "places_per_slice": SWEEP_PLACES,
        "slice_median_ms": statistics.median(slices_ms),
        "slice_max_ms": max(slices_ms),
        "whole_ms": sum(slices_ms),
    }


def measure(blocks: int, runs: int, decisions: int, seed: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    memory = index_memory(blocks, seed)
    timings: list[Timing] = []
    report_us: dict[str, float] = {}
    sweep: dict[str, float] = {}
    updates: dict[str, float] = {}
    for instances in sizes:
        cluster = Cluster(instances, blocks, seed)
        kinds = [("lmetric", "hit"), ("lmetric", "system"), ("lmetric", "cold")]
        if instances == 256:
            kinds += [(name, "hit") for name in OWN_POLICIES if name != "lmetric"]
        for policy, prompt in kinds:
            timings.append(time_decisions(cluster, policy, prompt, runs, decisions))
        report_us[str(instances)] = statistics.median(islice(cluster.reports_apply_ns, 20_000)) / 1000
        if instances == 256:
            updates = update_cpu_us(cluster)
            sweep = sweep_cpu_ms(cluster)
            timings += time_kv(blocks, runs, decisions, seed)
    headline = next((t for t in timings if t.instances == 256 and t.policy == "lmetric"), timings[0])
    return {
        "benchmark": "placement",
        "python": platform.python_version(),
        "machine": platform.machine(),
        "seed": seed,
        "runs": runs,
        "decisions_per_run": decisions,
        "blocks_indexed": blocks,
        "headline": {
            "instances": headline.instances,
            "median_cpu_us": headline.median_cpu_us,
            "bound_cpu_us": BOUND_CPU_US,
            "ratio_to_bound": headline.median_cpu_us / BOUND_CPU_US,
            "bytes_per_block": memory["bytes_per_block"],
            "bound_bytes_per_block": BOUND_BYTES,
        },
        "timings": [asdict(timing) for timing in timings],
        "index_memory": memory,
        "apply_load_report_median_cpu_us": report_us,
        "kv_update_cpu_us_per_block": updates,
        "sweep_after_death_cpu": sweep,
    }


def print_table(result: dict[str, Any]) -> None:
    print(
        f"{'instances':>9}  {'policy':12}  {'KV':6}  {'prompt':7}  {'median us':>9}  {'p99 us':>7}  medians of the runs"
    )
    for t in result["timings"]:
        runs = " ".join(f"{value:.1f}" for value in t["median_cpu_us_per_run"])
        print(
            f"{t['instances']:>9}  {t['policy']:12}  {t['kv']:6}  {t['prompt']:7}  {t['median_cpu_us']:9.1f}  "
            f"{t['p99_cpu_us']:7.1f}   {runs}"
        )
    memory = result["index_memory"]
    print(
        f"index: {memory['bytes_per_block']:.0f} bytes per block held by one instance, "
        f"{memory['blocks']} blocks of at most {memory['max_blocks']}"
    )
    for name in ("apply_load_report_median_cpu_us", "kv_update_cpu_us_per_block", "sweep_after_death_cpu"):
        print(f"{name}: {json.dumps({key: round(value, 3) for key, value in result[name].items()})}")


@click.command(help=__doc__.split("\n")[0] if __doc__ else None)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Where the result goes as JSON.")
@click.option("--blocks", default=1_000_000, show_default=True)
@click.option("--runs", default=5, show_default=True)
@click.option("--decisions", default=2000, show_default=True, help="Per run.")
@click.option("--seed", default=1, show_default=True)
@click.option("--instances", multiple=True, type=int, default=(8, 64, 256, 1024), show_default=True)
def main(json_path: Path | None, blocks: int, runs: int, decisions: int, seed: int, instances: tuple[int, ...]) -> None:
    result = measure(blocks, runs, decisions, seed, instances)
    print_table(result)
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
