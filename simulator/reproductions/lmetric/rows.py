"""LMetric's claims beside what was measured."""

from collections.abc import Iterator

from simulator.reproductions.lmetric import setup
from simulator.reproductions.lmetric.experiment import Measured, OnLoad, Placed
from simulator.reproductions.lmetric.hotspot import INSTANCES
from simulator.reproductions.report import ReportRow

BEATEN_PERCENT = 2.0
"""A rival that is better by no more than this does not count as better."""
CHAT = setup.LOADS[0].name


def rows_of(measured: Measured) -> tuple[ReportRow, ...]:
    """All of them: the paper's first, then what it has no figure for."""
    rows: list[ReportRow] = []
    for name, on_load in measured.loads.items():
        rows += _against_vllm(name, on_load)
        rows += _against_rivals(name, on_load)
        rows += _caching_and_balance(name, on_load)
        rows += _ablations(name, on_load)
        rows += _limits(name, on_load)
    rows += _hotspot(measured)
    return tuple(rows)


def gain_percent(ours: float | None, theirs: float | None) -> float | None:
    """By how much ours is lower; negative where it is higher."""
    return None if ours is None or not theirs else 100 * (1 - ours / theirs)


def _against_vllm(name: str, on_load: OnLoad) -> Iterator[ReportRow]:
    ours, vllm = on_load.at_half[setup.OURS].report, on_load.at_half[setup.VLLM].report
    for what, mine, theirs, published in (
        ("TTFT", ours.ttft_ms.mean, vllm.ttft_ms.mean, 92.0),
        ("TPOT", ours.tpot_ms.mean, vllm.tpot_ms.mean, 24.0),
    ):
        gain = gain_percent(mine, theirs)
        paper = published if name == CHAT else None
        yield ReportRow(
            claim=f"{name}: mean {what} below that of vLLM's policy",
            paper=paper,
            ours=gain,
            unit="%",
            why="" if paper is None else _why_vllm(on_load, what, gain, published),
        )


def _why_vllm(on_load: OnLoad, what: str, gain: float | None, published: float) -> str:
    """From the two policies' hit ratios and waiting: what there was to be gained."""
    if gain is not None and abs(gain - published) <= 5:
        return ""
    ours, vllm = on_load.at_half[setup.OURS].report, on_load.at_half[setup.VLLM].report
    hits, misses = ours.prefix_hit_rate or 0.0, vllm.prefix_hit_rate or 0.0
    computed = (1 - hits) / max(1 - misses, 1e-9)
    if what == "TTFT":
        return (
            f"The trace is another one (the paper's chat trace is not public in full): here LMetric computes "
            f"{computed:.0%} of the prompt tokens that vLLM's policy computes (hit ratio {hits:.0%} against "
            f"{misses:.0%}), and TTFT at half the highest rate is mostly prefill of prompts of 12k tokens on average, "
            "not waiting that better placement could remove."
        )
    return (
        "TPOT falls with the prefill work that decodes share their steps with, of which "
        f"{1 - computed:.0%} is saved here (hit ratio {hits:.0%} against {misses:.0%}); chunks of 2,048 tokens weigh "
        "on decodes as much as the trace's prompts are long."
    )


def _against_rivals(name: str, on_load: OnLoad) -> Iterator[ReportRow]:
    ours = on_load.at_half[setup.OURS].report
    for what in ("TTFT", "TPOT"):
        rivals = {setup.VLLM: on_load.at_half[setup.VLLM], **{r: on_load.at_half[b] for r, b in on_load.best.items()}}
        means = {rival: _mean(placed, what) for rival, placed in rivals.items()}
        mine = _mean(on_load.at_half[setup.OURS], what)
        best = min((mean, rival) for rival, mean in means.items() if mean is not None)
        worse = None if mine is None else 100 * (mine / best[0] - 1)
        setting = on_load.best.get(best[1], best[1])
        beaten = worse is not None and worse > BEATEN_PERCENT
        yield ReportRow(
            claim=f"{name}: mean {what} above that of the best rival, each tuned on this trace",
            paper="at most 2" if name == CHAT else None,
            ours=worse,
            unit="%",
            why=f"{setting} is better on this trace: its hit ratio is "
            f"{_hits(on_load, setting)} against {ours.prefix_hit_rate or 0:.1%}, its imbalance "
            f"{on_load.at_half[setting].imbalance_tokens:,.0f} tokens against "
            f"{on_load.at_half[setup.OURS].imbalance_tokens:,.0f}."
            if beaten
            else "",
        )


def _mean(placed: Placed, what: str) -> float | None:
    return placed.report.ttft_ms.mean if what == "TTFT" else placed.report.tpot_ms.mean


def _hits(on_load: OnLoad, name: str) -> str:
    return f"{on_load.at_half[name].report.prefix_hit_rate or 0:.1%}"


def _caching_and_balance(name: str, on_load: OnLoad) -> Iterator[ReportRow]:
    ours = on_load.at_half[setup.OURS]
    rival = max(on_load.best.values(), key=lambda name: on_load.at_half[name].report.prefix_hit_rate or 0.0)
    best = on_load.at_half[rival].report.prefix_hit_rate or 0.0
    mine = ours.report.prefix_hit_rate or 0.0
    yield ReportRow(
        claim=f"{name}: hit ratio over that of the KV-aware rival that has the highest",
        paper="about 1" if name == CHAT else None,
        ours=mine / best if best else None,
        unit="x",
        why=""
        if not best or mine / best > 0.97
        else f"{rival} has {_hits(on_load, rival)} against {mine:.1%}, at an imbalance of "
        f"{on_load.at_half[rival].imbalance_tokens:,.0f} tokens against {ours.imbalance_tokens:,.0f}.",
    )
    llmd = on_load.at_half[on_load.best[setup.LLMD]]
    ratio = ours.imbalance_tokens / llmd.imbalance_tokens if llmd.imbalance_tokens else None
    yield ReportRow(
        claim=f"{name}: imbalance of prefill work over that of the simulation-based policy",
        paper="below 1" if name == CHAT else None,
        ours=ratio,
        unit="x",
        why=""
        if ratio is None or ratio < 1
        else "Likely because the simulation-based policy's costs are fitted to the modelled engine itself, more "
        "closely than to a real one; not looked into further.",
    )


def _ablations(name: str, on_load: OnLoad) -> Iterator[ReportRow]:
    ours, ratio = on_load.at_half[setup.OURS], on_load.at_half["(1 - hit) x BS"]
    for what, mine, theirs, published in (
        ("P50", ours.ttft_p50_ms, ratio.ttft_p50_ms, 14.4),
        ("P95", ours.ttft_p95_ms, ratio.ttft_p95_ms, 42.8),
    ):
        gain = gain_percent(mine, theirs)
        yield ReportRow(
            claim=f"{name}: {what} TTFT below that of (1 - hit ratio) x BS",
            paper=published if name == CHAT else None,
            ours=gain,
            unit="%",
            why=""
            if name != CHAT or gain is None or gain > published - 5
            else "The hit ratio misses what waits to be prefilled. At half the highest rate little waits on this "
            f"trace: P95 TTFT is {ours.ttft_p95_ms / max(ours.ttft_p50_ms, 1e-9):.1f} x P50.",
        )
    tokens = on_load.at_half["P-token x tokens"].report
    yield ReportRow(
        claim=f"{name}: mean TPOT below that of P-token x total tokens",
        paper=None,
        ours=gain_percent(ours.report.tpot_ms.mean, tokens.tpot_ms.mean),
        unit="%",
    )
    plus = on_load.at_half["lmetric, BS + 1"].report
    yield ReportRow(
        claim=f"{name}: mean TTFT of P-token x (BS + 1) over that of the literal P-token x BS",
        paper=None,
        ours=None
        if not ours.report.ttft_ms.mean or plus.ttft_ms.mean is None
        else plus.ttft_ms.mean / ours.report.ttft_ms.mean,
        unit="x",
    )
    detector = on_load.at_half["lmetric, hotspot detector"].report
    yield ReportRow(
        claim=f"{name}: mean TTFT with the hotspot detector over that without (no hotspots: no harm)",
        paper="1" if name == CHAT else None,
        ours=None
        if not ours.report.ttft_ms.mean or detector.ttft_ms.mean is None
        else detector.ttft_ms.mean / ours.report.ttft_ms.mean,
        unit="x",
    )


def _limits(name: str, on_load: OnLoad) -> Iterator[ReportRow]:
    yield ReportRow(
        claim=f"{name}: highest rate by vLLM's policy, as a share of the fluid bound",
        paper=None,
        ours=on_load.highest.req_s / on_load.fluid_req_s,
        unit="x",
    )


def _hotspot(measured: Measured) -> Iterator[ReportRow]:
    plain, saved = measured.hotspot["lmetric"], measured.hotspot["lmetric with its detector"]
    yield ReportRow(
        claim="hotspot: share of the hot class that one of 16 instances gets, by the product alone",
        paper="most",
        ours=plain.largest_share,
        unit="share",
        why=""
        if plain.largest_share > 0.5
        else f"Not most of the class, but {plain.largest_share * INSTANCES:.1f} times an even share.",
    )
    yield ReportRow(
        claim="hotspot: the same with the detector",
        paper="less",
        ours=saved.largest_share,
        unit="share",
        why="" if saved.largest_share < plain.largest_share else "The detector raised no second alarm in this run.",
    )
    yield ReportRow(
        claim="hotspot: mean TPOT with the detector over that without",
        paper="below 1",
        ours=None if not plain.tpot_ms.mean or saved.tpot_ms.mean is None else saved.tpot_ms.mean / plain.tpot_ms.mean,
        unit="x",
    )
