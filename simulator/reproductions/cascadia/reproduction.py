"""Runs Cascadia's evaluation and turns the results into rows, plots and page."""

from simulator.reproductions.cascadia.experiment import run_all
from simulator.reproductions.cascadia.plots import draw
from simulator.reproductions.cascadia.rows import rows_of
from simulator.reproductions.cascadia.sections import sections_of
from simulator.reproductions.report import Findings
from simulator.reproductions.run import ReproductionRun


def reproduce(run: ReproductionRun) -> Findings:
    """Run or read Cascadia's experiments; returns rows, page sections and plots (`registry.Paper`)."""
    measured = run_all(run)
    return Findings(rows=rows_of(measured), sections=sections_of(measured, run), plots=draw(run.plots, measured))
