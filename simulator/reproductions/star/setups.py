"""Clusters, rates and limits of STAR's evaluation (section 6.1)."""

from dataclasses import dataclass

from simulator.report.report import Slo
from simulator.reproductions.star.experiment import Hardware

SMALL = Hardware("small", 1, 3, "RTX-4090D", "R1-Distill-Qwen-7B", "fp8")
"""W8A8: 8-bit weights and products; fp8 stands for it in the cost model."""
LARGE = Hardware("large", 2, 6, "H800", "Qwen3-14B")
"""The paper names two models and does not say which one runs in figure 10 (g-i): of the two, this one's KV memory
(247K tokens on an 80 GB device, against 1M for the 7B model) is the one that five requests can fill."""
SMALL_SLO = Slo(ttft_ms=1000.0, tpot_ms=25.0)
LARGE_SLO = Slo(ttft_ms=1000.0, tpot_ms=50.0)

SMALL_RATE, SMALL_STRESS = 0.17, 0.23
LARGE_RATE, LARGE_STRESS = 0.20, 0.50
"""Requests per second: the paper's, and ours at which requests would fill about three quarters of the decode
instances' KV memory if they lay evenly; the paper's testbed is at its limits at lower rates than the model of it."""

BINS = {
    "6-bin": (0, 2048, 4096, 6144, 8192, 16_384, 32_768),
    "4-bin": (0, 4096, 8192, 16_384, 32_768),
    "2-bin": (0, 8192, 32_768),
}
SCALE_RATE_PER_INSTANCE = 0.3 / 8
SCALE_LINK_GBIT = 25.0


def scaled(instances: int) -> Hardware:
    """The small cluster's devices, a quarter of them for prefill, behind 25 Gbit/s links (section 6.3)."""
    prefills = instances // 4
    return Hardware(
        f"{instances} instances",
        prefills,
        instances - prefills,
        SMALL.device,
        SMALL.model,
        SMALL.weight_dtype,
        link_gbit_per_s=SCALE_LINK_GBIT,
        report_interval_ms=1000.0,
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and at which sizes and rates the experiments run, full or quick."""

    seconds: float
    scale_seconds: float
    scale_sizes: tuple[int, ...]
    sweep: tuple[float, ...]
    """Rates of the small cluster."""
    seeds: int


FULL = Plan(2000.0, 600.0, (8, 16, 32, 64, 128, 256), (0.14, 0.17, 0.20, 0.23, 0.26), 5)
QUICK = Plan(1000.0, 150.0, (8, 64, 256), (0.17, 0.23), 1)
