"""A report as people read it: one column per run, so that runs stand side by side."""

from collections.abc import Mapping

from rich.table import Table

from simulator.report.report import Latencies, Report

_MAX_INSTANCE_ROWS = 8


def report_table(
    reports: Mapping[str, Report], title: str = "", more: Mapping[str, Mapping[str, str]] | None = None
) -> Table:
    """A column for each report, named by its key. More than eight instances are summed up in one row. `more` has
    further rows for a report, by its key."""
    table = Table(title=title or None, title_justify="left")
    table.add_column("")
    for name in reports:
        table.add_column(name, justify="right")
    columns = [{**report_rows(report), **(more or {}).get(name, {})} for name, report in reports.items()]
    labels = dict.fromkeys(label for column in columns for label in column)
    for label in labels:
        table.add_row(label, *(column.get(label, "-") for column in columns))
    return table


def report_rows(report: Report) -> dict[str, str]:
    """Name and text of each row."""
    slo = report.slo
    limits = f"TTFT {_limit(slo.ttft_ms)}, TPOT {_limit(slo.tpot_ms)}"
    rows = [
        ("requests", f"{report.requests:,}"),
        ("errors", f"{report.errors:,}"),
        *_latency_rows("TTFT ms", report.ttft_ms),
        *_latency_rows("TPOT ms", report.tpot_ms),
        *_latency_rows("end to end ms", report.e2e_ms),
        ("throughput tokens/s", f"{report.throughput_tok_s:,.1f}"),
        ("throughput requests/s", f"{report.throughput_req_s:,.2f}"),
        ("goodput requests/s", f"{report.goodput_req_s:,.2f}"),
        ("SLO", limits),
        ("SLO attainment", _percent(slo.attainment)),
        ("prefix hit rate", _percent(report.prefix_hit_rate)),
        ("policy", report.policy or "-"),
        *_instance_rows(report),
        ("seed", str(report.seed)),
    ]
    return dict(rows)


def _latency_rows(name: str, latencies: Latencies) -> list[tuple[str, str]]:
    figures = ("mean", "p50", "p90", "p95", "p99")
    return [(f"{name} {figure}", _milliseconds(getattr(latencies, figure))) for figure in figures]


def _instance_rows(report: Report) -> list[tuple[str, str]]:
    shares = report.per_instance
    if len(shares) <= _MAX_INSTANCE_ROWS:
        return [(f"share of {name}", _percent(entry.share)) for name, entry in shares.items()]
    values = [entry.share for entry in shares.values()]
    return [(f"share of each of {len(shares)} instances", f"{_percent(min(values))} to {_percent(max(values))}")]


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _limit(value_ms: float | None) -> str:
    return "any" if value_ms is None else f"{value_ms:g} ms"
