"""CascadeInfer's claims beside what the simulator shows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from simulator.cost.model import BatchShape, CostModel, PrefillChunk
from simulator.instance.config import InstanceConfig
from simulator.reproductions.cascadeinfer.experiments import (
    BALANCING,
    FULL,
    IDLE_RATE,
    LAYOUTS,
    QUICK,
    REFINEMENTS,
    Scale,
    job_name,
    profile_jobs,
    run_jobs,
    settings,
    with_quality,
)
from simulator.reproductions.cascadeinfer.profiling import ProfileResult
from simulator.reproductions.cascadeinfer.sections import plots, sections
from simulator.reproductions.cascadeinfer.systems import RunResult, Setting, SystemKind, lengths_of
from simulator.reproductions.report import Findings, ReportRow
from simulator.reproductions.run import ReproductionRun

Results: TypeAlias = Mapping[str, RunResult]

OURS = SystemKind.CASCADE.value
VLLM = SystemKind.VLLM.value
FIGURE_2_BATCH = 512


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the cost model says of the data set: why the gains are what they are."""

    stretch: float
    """Decode step with the data set's mixed lengths over one of equal lengths and as many tokens, at a batch of 512
    (figure 2 of the paper: 1.1 to 2.1 for the attention kernels)."""
    prefill_share: float
    """Of the time that an instance spends on a request in full batches, the part that computes its prompt."""


def reproduce(run: ReproductionRun) -> Findings:
    """Profile, run everything, and compare."""
    return measure(run, QUICK if run.quick else FULL)


def measure(run: ReproductionRun, scale: Scale) -> Findings:
    """Profile, run and compare at any scale."""
    # Fail before the long part where data are missing.
    run.data_file("lengths/sharegpt_8k_llama2.csv.gz")
    run.trace("mooncake_conversation.jsonl.gz")
    made = settings(run.data, run.seed)
    profiles = run.run_jobs(profile_jobs(made, scale))
    by_setting = {name.removeprefix("profile "): profile for name, profile in profiles.items()}
    made = with_quality(made, {name: profile.fit.model for name, profile in by_setting.items()})
    results = run.run_jobs(run_jobs(made, scale))
    return compose(run, scale, made, by_setting, results)


def compose(
    run: ReproductionRun,
    scale: Scale,
    made: Mapping[str, Setting],
    profiles: Mapping[str, ProfileResult],
    results: Results,
) -> Findings:
    """Rows, plots and page from what was measured."""
    diagnosis = diagnose(made["small"], run.seed)
    return Findings(
        rows=(
            *accuracy_rows(profiles["small"]),
            *throughput_rows(results, scale, diagnosis),
            *latency_rows(results, scale, diagnosis),
            *slo_rows(results, scale),
            *ablation_rows(results, scale, diagnosis),
            *layout_rows(results, scale),
            *refinement_rows(results, scale),
            *balancing_rows(results, scale),
        ),
        plots=plots(run.plots, results, scale),
        sections=sections(made, profiles, results, scale),
    )


def diagnose(setting: Setting, seed: int) -> Diagnosis:
    """From the cost model alone."""
    config, cost = setting.instance(SystemKind.CASCADE)
    lengths = np.array(lengths_of(setting))
    chosen = lengths[np.random.default_rng(seed).integers(0, len(lengths), FIGURE_2_BATCH)]
    contexts = chosen[:, 0] + chosen[:, 1] // 2
    total = int(contexts.sum())
    equal = np.full(FIGURE_2_BATCH, total // FIGURE_2_BATCH)
    mixed_ms = cost.step_ms(BatchShape(decode_context_tokens=contexts, decode_context_tokens_sum=total))
    equal_ms = cost.step_ms(BatchShape(decode_context_tokens=equal, decode_context_tokens_sum=int(equal.sum())))
    prefill_ms = float(np.mean([_prefill_ms(int(tokens), config, cost) for tokens in chosen[:, 0]]))
    decode_ms = float(chosen[:, 1].mean()) * mixed_ms / FIGURE_2_BATCH
    return Diagnosis(mixed_ms / equal_ms, prefill_ms / (prefill_ms + decode_ms))


def _prefill_ms(tokens: int, config: InstanceConfig, cost: CostModel) -> float:
    chunks = range(0, tokens, config.max_step_tokens)
    return sum(
        cost.step_ms(BatchShape(prefill=(PrefillChunk(min(config.max_step_tokens, tokens - done), done),)))
        for done in chunks
    )


def ratio(results: Results, part: str, rates: Sequence[float], rival: str, figure: str, ours: str = OURS) -> float:
    """Ours over the rival's, the mean over the rates."""
    return float(
        np.mean(
            [
                getattr(results[job_name(part, ours, rate)], figure)
                / getattr(results[job_name(part, rival, rate)], figure)
                for rate in rates
            ]
        )
    )


def percent(part: float) -> float:
    """A ratio as a change in percent."""
    return 100 * (part - 1)


def accuracy_rows(profile: ProfileResult) -> tuple[ReportRow, ...]:
    """Accuracy of the QoE model beside figure 13's."""
    return (
        ReportRow(
            claim="QoE model, mean relative error on the held-out half",
            paper=8.9,
            ours=100 * profile.fit.relative_error,
            unit="%",
            why=(
                "Errors over the measured latency are squared here. The published fit squares absolute errors, which "
                f"gives {100 * profile.absolute_relative_error:.1f} %: a few slow requests dominate it."
            ),
        ),
        ReportRow(
            claim="Static mean latency, the same error",
            paper=64.0,
            ours=100 * profile.fit.static_relative_error,
            unit="%",
            why="It depends on the spread of the profiled configurations: batches of 1 to 1,024 here, unknown there.",
        ),
    )


def throughput_rows(results: Results, scale: Scale, diagnosis: Diagnosis) -> tuple[ReportRow, ...]:
    """Throughput under heavy load beside figure 10's."""
    why = (
        f"Decode steps of mixed lengths take {diagnosis.stretch:.2f}x those of equal ones here (batch of "
        f"{FIGURE_2_BATCH}; the paper measures 1.1x to 2.1x for attention kernels), and "
        f"{diagnosis.prefill_share:.0%} of an instance's time goes into prompts, which no grouping shortens. Most of "
        "what is gained beyond capacity is that the stages of short requests keep up while the longest one's queue "
        f"grows: {_tail(results, scale)}."
    )
    rows = []
    for rival, published in ((VLLM, 1.99), (SystemKind.SGLANG.value, 2.18), (SystemKind.LLUMNIX.value, 1.71)):
        engine = "The rival is round robin with prefill chunks of 8,192: its engine's own costs are not modelled. "
        note = (engine if rival == SystemKind.SGLANG else "") + why
        figures = (
            ("heavy load, 3B", ratio(results, "small", scale.heavy_rates, rival, "throughput_tok_s"), note),
            (
                "highest rate, 14B",
                ratio(results, "moderate", scale.moderate_rates[-1:], rival, "throughput_tok_s"),
                "The paper's figure is the mean over eight models; causes as with 3B.",
            ),
        )
        rows += [
            ReportRow(claim=f"Throughput over {rival}, {load}", paper=published, ours=ours, unit="x", why=reason)
            for load, ours, reason in figures
        ]
    return tuple(rows)


def _tail(results: Results, scale: Scale) -> str:
    ours, vllm = (results[job_name("small", name, scale.heaviest)].p95_ttft_ms / 1000 for name in (OURS, VLLM))
    return f"p95 TTFT at {scale.heaviest:g}/s is {ours:.0f} s, vLLM's {vllm:.0f} s"


def latency_rows(results: Results, scale: Scale, diagnosis: Diagnosis) -> tuple[ReportRow, ...]:
    """Mean latencies beside figures 6, 7 and 9."""
    ttft_why = (
        f"TTFT is made of prefills ({diagnosis.prefill_share:.0%} of the work here). Those of long prompts share few "
        f"instances and queue there: {_tail(results, scale)}. The published partition weighs requests alike, and few "
        "are long."
    )
    tpot_why = "Short requests gain, the longest stages' lose; the mean weighs requests, most of which are short."
    rows = []
    for rival, ttft, tpot, normalised in (
        (VLLM, "-67 to -78", "-30 to -64", "up to -67"),
        (SystemKind.SGLANG.value, "-70 to -84", "-25 to -77", None),
        (SystemKind.LLUMNIX.value, "-36 to -66", "-3.4 to -56", None),
    ):
        for figure, name, published, why in (
            ("mean_ttft_ms", "Mean TTFT", ttft, ttft_why),
            ("mean_tpot_ms", "Mean TPOT", tpot, tpot_why),
            ("normalised_ms", "Mean normalised latency", normalised, tpot_why),
        ):
            ours = percent(ratio(results, "small", scale.heavy_rates, rival, figure))
            claim = f"{name} against {rival}, heavy load, 3B"
            rows.append(ReportRow(claim=claim, paper=published, ours=ours, unit="%", why=why))
    return tuple(rows)


def slo_rows(results: Results, scale: Scale) -> tuple[ReportRow, ...]:
    """SLO attainment beside figure 12's."""
    idle = results[job_name("idle", "idle", IDLE_RATE)]
    rates = (scale.busy_rate, *scale.heavy_rates)
    rows = []
    for times, published in ((5, "3.8 to 7.6"), (20, "2.0 to 2.8")):
        bounds = (times * idle.mean_ttft_ms, times * idle.mean_tpot_ms)
        ours, rival = (
            [results[job_name("small", name, rate)].attainment(*bounds) for rate in rates] for name in (OURS, VLLM)
        )
        by_rate = ", ".join(
            f"{mine:.1%} against {theirs:.1%} at {rate:g}/s"
            for mine, theirs, rate in zip(ours, rival, rates, strict=True)
        )
        rows.append(
            ReportRow(
                claim=f"SLO attainment at {times}x over vLLM at {rates[0]:g}/s, 3B",
                paper=published,
                ours=ours[0] / rival[0] if rival[0] else None,
                unit="x",
                why=(
                    f"{by_rate}; within {bounds[0]:.0f} ms TTFT and {bounds[1]:.0f} ms TPOT (from an idle cluster, as "
                    "in the paper). The ratio depends on how far above capacity the rate is, which is not given."
                ),
            )
        )
    return tuple(rows)


def ablation_rows(results: Results, scale: Scale, diagnosis: Diagnosis) -> tuple[ReportRow, ...]:
    """Ours alone: how much of the gain is the length heterogeneity of attention."""
    rival = VLLM
    rows = []
    for figure, name in (("throughput_tok_s", "throughput"), ("normalised_ms", "normalised latency")):
        mixed = percent(ratio(results, "small", scale.heavy_rates, rival, figure))
        level = percent(ratio(results, "level", scale.heavy_rates, rival, figure))
        rows.append(
            ReportRow(
                claim=f"Gain in {name} over vLLM that remains without attention's sensitivity to mixed lengths",
                paper=None,
                ours=100 * level / mixed if mixed else None,
                unit="%",
                why=(
                    f"{level:+.1f} % with the heterogeneity term of the cost model off, {mixed:+.1f} % with it on. "
                    "Most of the gain is no effect of kernels: separating many short from few long requests lowers the "
                    "sum of requests x load (equation 1) by itself."
                ),
            )
        )
        measured = percent(ratio(results, "measured", scale.heavy_rates, rival, figure))
        rows.append(
            ReportRow(
                claim=f"Gain in {name} over vLLM that remains where unevenness costs what was measured",
                paper=None,
                ours=100 * measured / mixed if mixed else None,
                unit="%",
                why=(
                    f"{measured:+.1f} % with the table of an RTX PRO 6000 (docs/cost_models.md) in place of the H20's "
                    f"tile model, {mixed:+.1f} % with the tile model. Nobody has measured an H20."
                ),
            )
        )
    long_rate = scale.long_rates[-1]
    rows.append(
        ReportRow(
            claim=f"Throughput over vLLM with conversations up to 128K at {long_rate:g}/s, 3B",
            paper=None,
            ours=ratio(results, "long", (long_rate,), rival, "throughput_tok_s"),
            unit="x",
            why="The public ShareGPT lengths end at 8K; these are Mooncake's, 12K tokens of prompt on average.",
        )
    )
    rows.append(
        ReportRow(
            claim=f"Decode step with mixed over equal lengths, batch of {FIGURE_2_BATCH}, 3B",
            paper="1.1 to 2.1",
            ours=diagnosis.stretch,
            unit="x",
            why=(
                "The paper measures kernels, on an H100, with lengths up to 128K; here it is the whole step of an H20 "
                "with lengths up to 8K, and a balanced split of the KV, which leaves only the last wave uneven."
            ),
        )
    )
    return tuple(rows)


def layout_rows(results: Results, scale: Scale) -> tuple[ReportRow, ...]:
    """The stage layouts of figure 14 against each other."""
    published = {"chain": (-30.0, 7.1), "no pipeline": (None, None), "two-phase heuristic": (None, None)}
    rows = []
    for name in LAYOUTS:
        latency, throughput = _against(results, scale, "layout", name)
        stages = sorted({len(results[job_name("layout", name, rate)].stages) for rate in scale.heavy_rates})
        why = {
            "chain": "Both are planned by the same model; the chain's stages of one instance cannot balance load.",
            "no pipeline": "The paper gives no figure beyond 'the worst'.",
            "two-phase heuristic": "The paper plans by it. At these rates, on one cut per octave, it merges its chain "
            f"into {' or '.join(map(str, stages))} stage(s); ours plans by the exact program on four cuts per octave.",
        }[name]
        rows += [
            ReportRow(
                claim=f"Normalised latency against the {name} layout, heavy load",
                paper=published[name][0],
                ours=percent(latency),
                unit="%",
                why=why,
            ),
            ReportRow(
                claim=f"Throughput against the {name} layout, heavy load",
                paper=published[name][1],
                ours=percent(throughput),
                unit="%",
                why=why,
            ),
        ]
    return tuple(rows)


def refinement_rows(results: Results, scale: Scale) -> tuple[ReportRow, ...]:
    """The boundary refinements of figure 15 against each other."""
    published = {"memory": (-21.0, 12.0), "quantity": (None, None), "frozen": (None, None)}
    why = (
        "All begin at the same planned boundaries and refine every 5 s with a weight of 0.2 (the paper gives neither), "
        "and lengths do not drift within these runs, so that little is left to refine: frozen boundaries do as well."
    )
    rows = []
    for name in REFINEMENTS:
        latency, throughput = _against(results, scale, "refinement", name)
        rows += [
            ReportRow(
                claim=f"Normalised latency against {name} refinement, heavy load",
                paper=published[name][0],
                ours=percent(latency),
                unit="%",
                why=why,
            ),
            ReportRow(
                claim=f"Throughput against {name} refinement, heavy load",
                paper=published[name][1],
                ours=percent(throughput),
                unit="%",
                why=why,
            ),
        ]
    return tuple(rows)


def balancing_rows(results: Results, scale: Scale) -> tuple[ReportRow, ...]:
    """Imbalance within stages under the balancing schemes of figure 16."""
    rate = scale.busy_rate
    cv = {name: float(np.mean(results[job_name("balancing", name, rate)].output_cv)) for name in BALANCING}
    why = (
        "CV of output tokens per instance, mean over four stages of four: "
        + ", ".join(f"{name} {value:.3f}" for name, value in cv.items())
        + ". Instances compare their context tokens, as in the paper, and these are what bids even out; round robin "
        "deals out requests one by one, whose output tokens are even by themselves over so many."
    )
    return tuple(
        ReportRow(
            claim=f"Imbalance of output tokens within stages, full bid-ask against {rival}",
            paper=published,
            ours=percent(cv["full bid-ask"] / cv[rival]),
            unit="%",
            why=why,
        )
        for rival, published in (("inter-stage bid-ask", -40.0), ("round robin", -47.0))
    )


def _against(results: Results, scale: Scale, part: str, rival: str) -> tuple[float, float]:
    """Latency and throughput of ours over a variant, the mean over the heavy rates."""
    pairs = [
        (results[job_name("small", OURS, rate)], results[job_name(part, rival, rate)]) for rate in scale.heavy_rates
    ]
    latency = float(np.mean([ours.normalised_ms / theirs.normalised_ms for ours, theirs in pairs]))
    throughput = float(np.mean([ours.throughput_tok_s / theirs.throughput_tok_s for ours, theirs in pairs]))
    return latency, throughput
