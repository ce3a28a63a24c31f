"""Why a figure differs from the paper's, from what was measured beside it."""

import numpy as np

from simulator.cost.model import BatchShape
from simulator.reproductions.arrow import setup
from simulator.reproductions.arrow.experiment import HOST_STEP_MS, SCALED, SWEEP, Measured
from simulator.reproductions.arrow.setup import Trace
from simulator.reproductions.measurement import LoadPoint, SustainedLoad

AGREES_WITHIN = 0.1
"""Relative difference that needs no reason."""


def ratio(of: SustainedLoad, over: SustainedLoad) -> float | None:
    """Of two sustainable rates; None where one of them was not found."""
    return None if of.req_s is None or not over.req_s else of.req_s / over.req_s


def of_rival(measured: Measured, trace: Trace, rival: str, published: float | None, ours: float | None) -> str:
    """Arrow over another system of figure 7."""
    if ours is None:
        return "one of the two systems met the SLOs at no rate that was tried"
    if published is None:
        return _of_single_gpus(measured, trace, rival)
    if _agree(published, ours):
        return ""
    capacity = measured.prefill_tokens_s[trace.name]
    parts = [
        f"all GPUs together prefill {capacity[setup.ARROW]:,.0f} tokens/s of these prompts as single instances and "
        f"{capacity[rival]:,.0f} with the rival's tensor parallelism, by these costs",
        _host(measured, rival),
    ]
    if rival == setup.STATIC_TP4:
        parts.append(
            "the paper limited that system's batch to get around a defect of its KV transfers, which work here"
        )
    return "; ".join(parts)


def of_strategy(measured: Measured, trace: Trace, published: float | None, ours: float | None) -> str:
    """Arrow over a fixed split of figure 8."""
    if ours is None:
        return "one of the two met the SLOs at no rate that was tried"
    if published is None or _agree(published, ours):
        return ""
    split = sustained_point(measured.rates[trace.name][setup.MINIMAL_LOAD])
    ttft = (split.report.ttft_ms.p90 or 0.0) / (trace.slo.ttft_ms or 1.0) if split else 0.0
    tpot = (split.report.tpot_ms.p90 or 0.0) / (trace.slo.tpot_ms or 1.0) if split else 0.0
    scarce, lent = ("prefill", "decode") if ttft > tpot else ("decode", "prefill")
    return (
        f"the split's {scarce} instances are what limits it here, to which Arrow lends {lent} ones: at its sustainable "
        f"rate its P90 TTFT is {ttft:.0%} of the SLO, its P90 TPOT {tpot:.0%}"
    )


def of_bound(measured: Measured, trace: Trace) -> str:
    """Arrow's rate beside the fluid bound."""
    bound = measured.fluid_bounds[trace.name][setup.ARROW]
    text = f"no schedule can serve more than {bound:,.1f} requests/s with these costs, whatever the SLOs"
    at = sustained_point(measured.rates[trace.name][setup.ARROW])
    if at is None or at.offered_req_s <= bound:
        return text
    arrive_s, serve_s = at.report.requests / at.offered_req_s, at.report.requests / at.report.throughput_req_s
    return (
        f"{text}; requests can arrive faster than that for a while: these arrive within {arrive_s:.0f} s and the last "
        f"one ends after {serve_s:.0f} s, {at.report.throughput_req_s:,.1f} requests/s in all"
    )


def sustained_point(load: SustainedLoad) -> LoadPoint | None:
    """The measured point at the sustainable rate."""
    return next((point for point in load.points if point.scale == load.found.scale), None)


def of_gain(trace: Trace, gain: float) -> str:
    """Minimal load over round robin in attainment."""
    published = trace.minimal_over_round_robin
    if published is None or _agree(published, gain):
        return ""
    shares = ", ".join(f"{share:g}" for share in SWEEP)
    return f"compared at {shares} x the lower of their sustainable rates; at which rates the paper did, it does not say"


def of_scaling(measured: Measured) -> str:
    """More than linear, or less."""
    found = ratio(measured.scaled_rates[SCALED[1]], measured.scaled_rates[SCALED[0]])
    if found is None or _agree(SCALED[1] / SCALED[0], found):
        return ""
    if found < SCALED[1] / SCALED[0]:
        return "less than linear"
    return (
        "more than linear: a higher rate is the same trace in less time, so its bursts get shorter while the TTFT SLO "
        f"stays; and one instance is kept for each kind, a quarter of {SCALED[0]} GPUs and a sixteenth of {SCALED[1]}"
    )


def of_overload() -> str:
    """TPOT beyond the sustainable rate."""
    fleet = setup.fleet_of(setup.GPUS, 0)
    instance = fleet.cluster.instance
    context = instance.kv_blocks * instance.block_tokens // instance.max_batch_requests
    contexts = np.full(instance.max_batch_requests, context, np.int64)
    step_ms = fleet.cost.step_ms(
        BatchShape(decode_context_tokens=contexts, decode_context_tokens_sum=int(contexts.sum()))
    )
    return (
        f"a step that decodes {instance.max_batch_requests} requests with all KV memory in use takes {step_ms:.0f} ms "
        "by these costs: decoding alone stays below every TPOT SLO, only prompts in the same step bring it near"
    )


def _of_single_gpus(measured: Measured, trace: Trace, rival: str) -> str:
    at = sustained_point(measured.rates[trace.name][rival])
    if at is None or at.report.tpot_ms.p90 is None:
        return "the paper does not run this system"
    return (
        f"the paper does not run this system: its P90 TPOT at its own sustainable rate is "
        f"{at.report.tpot_ms.p90:.0f} ms of {trace.slo.tpot_ms:g}, so that prompts in the same steps disturb decoding "
        "less than these SLOs allow, and all instances take part in both phases"
    )


def _host(measured: Measured, rival: str) -> str:
    name, rates = next(iter(measured.host_bound.items()))
    what_if = ratio(rates[setup.ARROW], rates[rival])
    known = "unknown" if what_if is None else f"{what_if:.2f}"
    return f"steps take no time on the host here: with {HOST_STEP_MS:g} ms each, the ratio on {name} is {known}"


def _agree(published: float, ours: float) -> bool:
    return abs(ours / published - 1) <= AGREES_WITHIN
