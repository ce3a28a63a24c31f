"""Runs Arrow's evaluation and turns the results into rows, plots and page."""

from simulator.reproductions.arrow.experiment import run_all
from simulator.reproductions.arrow.page_sections import sections_of
from simulator.reproductions.arrow.plots import draw
from simulator.reproductions.arrow.rows import rows_of
from simulator.reproductions.report import Findings
from simulator.reproductions.run import ReproductionRun


def reproduce(run: ReproductionRun) -> Findings:
    """Run or read Arrow's experiments; returns rows, page sections and plots (`registry.Paper`)."""
    measured = run_all(run)
    return Findings(rows=rows_of(measured), sections=sections_of(measured, run), plots=draw(run.plots, measured))
