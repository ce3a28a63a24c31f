"""A reproduction as a page of markdown."""

from collections.abc import Iterable, Sequence

from simulator.reproductions.report import Figure, Findings, ReportRow, ReproductionReport


def page(report: ReproductionReport, findings: Findings, title: str, command: str) -> str:
    """The rows, the plots and the sections; `command` is the line that makes this page again."""
    quick = " (shortened: --quick)" if report.quick else ""
    lines = [
        f"# {title}",
        "",
        f"Made by `{command}`, seed {report.seed}, in {report.seconds:.0f} s{quick}.",
        "",
        markdown_table(
            ("claim", "paper", "ours", "unit", "why"),
            ((row.claim, show(row.paper), show_measured(row), row.unit, row.why) for row in report.rows),
        ),
    ]
    for plot in findings.plots:
        lines += ["", f"![{plot}](plots/{plot})"]
    for section in findings.sections:
        lines += ["", f"## {section.title}", "", section.markdown.strip()]
    return "\n".join(lines) + "\n"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the cells' bars and line breaks are made harmless."""
    body = ["| " + " | ".join(_cell(text) for text in row) + " |" for row in rows]
    return "\n".join([f"| {' | '.join(header)} |", "|" + " --- |" * len(header), *body])


def show(figure: Figure) -> str:
    """A figure as people read it: three significant digits, thousands in full."""
    if figure is None:
        return "-"
    if isinstance(figure, str):
        return figure
    return f"{figure:,.0f}" if abs(figure) >= 1000 else f"{figure:.3g}"


def show_measured(row: ReportRow) -> str:
    """What was measured, with half of its interval where it is a mean over seeds."""
    return f"{show(row.ours)} +- {row.interval:.2g}" if row.interval else show(row.ours)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
