"""The report of a reproduction and its JSON form, `report.json`."""

from typing import TypeAlias

import msgspec

from mesh.errors import PenstockError

Figure: TypeAlias = float | str | None


class ReportRow(msgspec.Struct, frozen=True, kw_only=True):
    """One claim of the paper beside what was measured here."""

    claim: str
    paper: Figure
    """As published; None where the paper gives no figure, which makes the row an observation of ours."""
    ours: Figure
    """As measured; None where it could not be measured, and `why` says why not."""
    unit: str
    why: str = ""
    """Why the two differ, from what was looked into; empty where they agree."""
    interval: float = 0.0
    """`ours` is a mean over seeds, and this half of its 95 % interval; 0: a single run."""


class ReproductionReport(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON form of a reproduction's result."""

    paper: str
    rows: tuple[ReportRow, ...]
    seed: int
    seconds: float
    """From start to end, all processes together taking part."""
    quick: bool
    """Shortened: fewer requests and coarser searches for the same rows."""


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the page besides the table of rows."""

    title: str
    markdown: str


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a paper's module: rows, page sections and plots."""

    rows: tuple[ReportRow, ...]
    sections: tuple[Section, ...] = ()
    """Setup, readings and tables of raw results, in this order on the page, below the rows and the plots."""
    plots: tuple[str, ...] = ()
    """Names of the PNG files in `run.plots`, in the order of the page."""


def encode_report(report: ReproductionReport) -> bytes:
    """The JSON form, indented, with a newline at its end."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def decode_report(document: bytes) -> ReproductionReport:
    """The report in `document`; raises PenstockError where it is not of the JSON form."""
    try:
        return msgspec.json.decode(document, type=ReproductionReport)
    except msgspec.DecodeError as error:
        raise PenstockError(f"not a report as `penstock reproduce` writes it: {error}") from error
