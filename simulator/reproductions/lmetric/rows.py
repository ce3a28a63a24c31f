"""LMetric's claims beside what was measured."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from simulator.report.interval import Estimate
from simulator.reproductions.lmetric import setup
from simulator.reproductions.lmetric.experiment import (
    CHAT,
    Measured,
    OnLoad,
    Placed,
    Runs,
    over_seeds,
)
from simulator.reproductions.lmetric.hotspot import INSTANCES
from simulator.reproductions.report import Figure, ReportRow

BEATEN_PERCENT = 2.0
"""A rival that is better by no more than this does not count as better."""
QUEUES_FROM = 3.0
"""vLLM's policy queues where its mean TTFT is so many times what it is at the lowest rate of the curve."""


def rows_of(measured: Measured) -> tuple[ReportRow, ...]:
    """All of them, load by load, then the hotspot's."""
    rows: list[ReportRow] = []
    for name, on_load in measured.loads.items():
        rows += _against_vllm(name, on_load)
        if name == CHAT:
            rows += _over_the_rate(name, on_load)
        rows += _against_rivals(name, on_load)
        rows += _caching_and_balance(name, on_load)
        rows += _weights(name, on_load)
        rows += _ablations(name, on_load)
        rows.append(_limit(name, on_load))
    rows += _hotspot(measured)
    return tuple(rows)


def gain_percent(ours: float | None, theirs: float | None) -> float | None:
    """By how much ours is lower; negative where it is higher."""
    return None if ours is None or not theirs else 100 * (1 - ours / theirs)


def ttft_gain(ours: Placed, theirs: Placed) -> float | None:
    """In percent of the other's mean TTFT."""
    return gain_percent(ours.ttft_ms, theirs.ttft_ms)


def tpot_gain(ours: Placed, theirs: Placed) -> float | None:
    """In percent of the other's mean TPOT."""
    return gain_percent(ours.tpot_ms, theirs.tpot_ms)


def _row(claim: str, paper: Figure, ours: Estimate, unit: str, why: str = "") -> ReportRow:
    return ReportRow(claim=claim, paper=paper, ours=ours.mean, unit=unit, why=why, interval=ours.half)


def _against_vllm(name: str, on_load: OnLoad) -> Iterator[ReportRow]:
    ours, vllm = on_load.at_half[setup.OURS], on_load.at_half[setup.VLLM]
    for what, gain_of, published in (("TTFT", ttft_gain, 92.0), ("TPOT", tpot_gain, 24.0)):
        gain = over_seeds(gain_of, ours, vllm)
        why = ""
        if name == CHAT and gain.mean is not None and gain.mean < published - 5:
            why = (
                "At half the best policy's highest rate vLLM's policy does not queue here: its TTFT is that of "
                f"prefilling {1 - vllm[0].hit_ratio:.0%} of the prompt tokens, LMetric's of "
                f"{1 - ours[0].hit_ratio:.0%}. "
                "The rows below have the rates at which it does."
            )
        yield _row(
            f"{name}: mean {what} below that of vLLM's policy, at half the highest rate",
            published if name == CHAT else None,
            gain,
            "%",
            why,
        )


def queueing_share(sweep: Mapping[str, Mapping[float, Runs]]) -> float:
    """The lowest rate of the curve at which vLLM's policy queues, as a share of the highest; the highest rate of the
    curve where it does at none."""
    curve = {share: runs[0].ttft_ms for share, runs in sweep[setup.VLLM].items()}
    lowest = curve[min(curve)]
    return next((share for share, ttft_ms in curve.items() if ttft_ms >= QUEUES_FROM * lowest), max(curve))


def _over_the_rate(name: str, on_load: OnLoad) -> Iterator[ReportRow]:
    """Figure 25: the gap widens with the rate, up to the knee of vLLM's policy and beyond."""
    ours, vllm = on_load.sweep[setup.OURS], on_load.sweep[setup.VLLM]
    knee = queueing_share(on_load.sweep)
    lowest = min(ours)
    beyond = [(share, "where vLLM's policy queues") for share in ours if share >= knee]
    for share, where in ((lowest, "the lowest rate of the curve"), *beyond):
        for what, gain_of, published in (("TTFT", ttft_gain, 92.0), ("TPOT", tpot_gain, 24.0)):
            yield _row(
                f"{name}: mean {what} below that of vLLM's policy at {share:g} of the highest rate, {where}",
                published if share != lowest else None,
                over_seeds(gain_of, ours[share], vllm[share]),
                "%",
            )
    yield _row(
        f"{name}: share of the highest rate from which on vLLM's policy queues",
        None,
        Estimate(knee),
        "x",
    )


def _against_rivals(name: str, on_load: OnLoad) -> Iterator[ReportRow]:
    ours = on_load.at_half[setup.OURS]
    for what, mean_of in (("TTFT", ttft_ms), ("TPOT", tpot_ms)):
        above = {
            setting: _ratio(mean_of, ours, on_load.at_half[setting], percent=True)
            for setting in (setup.VLLM, *on_load.best.values())
        }
        setting = max(above, key=lambda each: above[each].mean or 0.0)
        rival = on_load.at_half[setting][0]
        beaten = (above[setting].mean or 0.0) > BEATEN_PERCENT
        yield _row(
            f"{name}: mean {what} above that of the best rival, each tuned on this load",
            "at most 2" if name == CHAT else None,
            above[setting],
            "%",
            f"{setting} is better on this load: its hit ratio is {rival.hit_ratio:.1%} against "
            f"{ours[0].hit_ratio:.1%}, its imbalance {rival.imbalance_tokens:,.0f} tokens "
            f"against {ours[0].imbalance_tokens:,.0f}."
            if beaten
            else "",
        )


def _caching_and_balance(name: str, on_load: OnLoad) -> Iterator[ReportRow]:
    ours = on_load.at_half[setup.OURS]
    setting = max(on_load.best.values(), key=lambda each: on_load.at_half[each][0].hit_ratio)
    rival = on_load.at_half[setting]
    hits = _ratio(lambda each: each.hit_ratio, ours, rival)
    yield _row(
        f"{name}: hit ratio over that of the KV-aware rival that has the highest",
        "about 1" if name == CHAT else None,
        hits,
        "x",
        ""
        if hits.mean is None or hits.mean > 0.97
        else f"{setting} has {rival[0].hit_ratio:.1%} against {ours[0].hit_ratio:.1%}, at an imbalance of "
        f"{rival[0].imbalance_tokens:,.0f} tokens against {ours[0].imbalance_tokens:,.0f}.",
    )
    imbalance = _ratio(lambda each: each.imbalance_tokens, ours, on_load.at_half[on_load.best[setup.LLMD]])
    yield _row(
        f"{name}: imbalance of prefill work over that of the simulation-based policy",
        "below 1" if name == CHAT else None,
        imbalance,
        "x",
        ""
        if imbalance.mean is None or imbalance.mean < 1
        else "Likely because the simulation-based policy's costs are fitted to the modelled engine itself, more "
        "closely than to a real one; not looked into further.",
    )


def _weights(name: str, on_load: OnLoad) -> Iterator[ReportRow]:
    """Figures 9, 11 and 12: what the weight of the linear combination and the range of the filter are worth."""
    linear = {name: runs[0] for name, runs in on_load.at_half.items() if name.startswith(f"{setup.LINEAR}:")}
    ranges = {name: runs[0] for name, runs in on_load.at_half.items() if name.startswith(f"{setup.FILTER}:")}
    best_lambda, best_range = on_load.best[setup.LINEAR], on_load.best[setup.FILTER]
    least, *_, most = linear.values()
    is_chat = name == CHAT
    yield _row(
        f"{name}: lambda of the linear combination that has the lowest mean TTFT",
        0.7 if is_chat else None,
        Estimate(_setting(best_lambda)),
        "",
    )
    yield _row(
        f"{name}: hit ratio with lambda 0.9 over that with 0.3",
        "above 1" if is_chat else None,
        Estimate(most.hit_ratio / least.hit_ratio if least.hit_ratio else None),
        "x",
    )
    for what, mean_of in (("TTFT", ttft_ms), ("TPOT", tpot_ms)):
        yield _row(
            f"{name}: mean {what} with lambda 0.9 over that with the best lambda",
            "above 1" if is_chat else None,
            Estimate(mean_of(most) / mean_of(linear[best_lambda])),
            "x",
        )
    yield _row(
        f"{name}: range of the filter that has the lowest mean TTFT", None, Estimate(_setting(best_range)), "requests"
    )
    yield _row(
        f"{name}: mean TTFT with the worst range over that with the best",
        "above 1" if is_chat else None,
        Estimate(max(map(ttft_ms, ranges.values())) / ttft_ms(ranges[best_range])),
        "x",
    )
    yield _row(
        f"{name}: mean TTFT of the tuned filter over that of the tuned linear combination",
        "above 1" if is_chat else None,
        _ratio(ttft_ms, on_load.at_half[best_range], on_load.at_half[best_lambda]),
        "x",
    )


def _setting(name: str) -> float:
    """The number in `bailian: lambda 0.7`."""
    return float(name.rpartition(" ")[2])


def _ablations(name: str, on_load: OnLoad) -> Iterator[ReportRow]:
    ours, ratio = on_load.at_half[setup.OURS], on_load.at_half["(1 - hit) x BS"]
    for what, published in (("P50", 14.4), ("P95", 42.8)):
        gain = over_seeds(
            lambda mine, theirs, what=what: gain_percent(_ttft_at(mine, what), _ttft_at(theirs, what)), ours, ratio
        )
        tail = (_ttft_at(ours[0], "P95") or 0.0) / max(_ttft_at(ours[0], "P50") or 0.0, 1e-9)
        yield _row(
            f"{name}: {what} TTFT below that of (1 - hit ratio) x BS",
            published if name == CHAT else None,
            gain,
            "%",
            ""
            if name != CHAT or gain.mean is None or gain.mean > published - 5
            else "The hit ratio misses what waits to be prefilled. At half the highest rate little waits on this "
            f"load: P95 TTFT is {tail:.1f} x P50.",
        )
    yield _row(
        f"{name}: mean TPOT below that of P-token x total tokens",
        None,
        over_seeds(tpot_gain, ours, on_load.at_half["P-token x tokens"]),
        "%",
    )
    yield _row(
        f"{name}: mean TTFT of P-token x (BS + 1) over that of the literal P-token x BS",
        None,
        _ratio(ttft_ms, on_load.at_half["lmetric, BS + 1"], ours),
        "x",
    )
    yield _row(
        f"{name}: mean TTFT with the hotspot detector over that without (no hotspots: no harm)",
        "1" if name == CHAT else None,
        _ratio(ttft_ms, on_load.at_half["lmetric, hotspot detector"], ours),
        "x",
    )


def _limit(name: str, on_load: OnLoad) -> ReportRow:
    highest = on_load.highest
    return _row(
        f"{name}: highest rate ({highest.finder}), as a share of the fluid bound",
        None,
        Estimate(highest.req_s / on_load.fluid_req_s),
        "x",
    )


def _hotspot(measured: Measured) -> Iterator[ReportRow]:
    plain, saved = measured.hotspot["lmetric"], measured.hotspot["lmetric with its detector"]
    share, less = (_mean(each.largest_share for each in runs) for runs in (plain, saved))
    yield _row(
        f"hotspot: share of the hot class that one of {INSTANCES} instances gets, by the product alone",
        "most",
        share,
        "share",
        ""
        if (share.mean or 0.0) > 0.5
        else f"Not most of the class, but {(share.mean or 0.0) * INSTANCES:.1f} times an even share.",
    )
    yield _row(
        "hotspot: the same with the detector",
        "less",
        less,
        "share",
        "" if (less.mean or 0.0) < (share.mean or 0.0) else "The detector raised no second alarm in these runs.",
    )
    tpots = [(mine.tpot_ms.mean, theirs.tpot_ms.mean) for mine, theirs in zip(saved, plain, strict=True)]
    yield _row(
        "hotspot: mean TPOT with the detector over that without",
        "below 1",
        _mean(mine / theirs for mine, theirs in tpots if mine and theirs),
        "x",
    )


def ttft_ms(placed: Placed) -> float:
    """Mean time to the first token under this placement."""
    return placed.ttft_ms


def tpot_ms(placed: Placed) -> float:
    """Mean time per output token under this placement."""
    return placed.tpot_ms


def _ttft_at(placed: Placed, what: str) -> float | None:
    return placed.report.ttft_ms.p50 if what == "P50" else placed.report.ttft_ms.p95


def _ratio(figure: Callable[[Placed], float], ours: Runs, theirs: Runs, *, percent: bool = False) -> Estimate:
    """Of two policies' figures, seed by seed; in percent: by how much ours is above the other."""

    def ratio(mine: Placed, other: Placed) -> float | None:
        if not figure(other):
            return None
        over = figure(mine) / figure(other)
        return 100 * (over - 1) if percent else over

    return over_seeds(ratio, ours, theirs)


def _mean(values: Iterable[float]) -> Estimate:
    return Estimate.of(list(values))
