"""Runs LMetric's evaluation and writes it up beside the paper's figures."""

from simulator.reproductions.lmetric.experiment import run_all
from simulator.reproductions.lmetric.rows import rows_of
from simulator.reproductions.lmetric.sections import draw, sections_of
from simulator.reproductions.report import Findings
from simulator.reproductions.run import ReproductionRun


def reproduce(run: ReproductionRun) -> Findings:
    """See `docs/papers/lmetric.md`. Raises `ConfigurationError` where data is missing."""
    measured = run_all(run)
    return Findings(rows=rows_of(measured), sections=sections_of(measured, run), plots=draw(measured, run))
