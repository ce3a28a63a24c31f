"""One run of a reproduction: its inputs, and the files that it writes."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mesh.errors import ConfigurationError
from simulator.reproductions.page import page
from simulator.reproductions.parallel import OnDone, run_jobs
from simulator.reproductions.registry import load, title_of
from simulator.reproductions.report import ReproductionReport, encode_report

Result = TypeVar("Result")

REPORT_FILE = "report.json"
PAGE_FILE = "report.md"
PLOTS_FOLDER = "plots"


@dataclass(frozen=True, slots=True)
class ReproductionRun:
    """What a paper's module is given: its data, folders, and workers for its runs."""

    data: Path
    """Folder of the data sets, with `traces/`, `lengths/`, `quality/` and `profiles/`."""
    out: Path
    seed: int
    quick: bool
    """Give the same rows from shorter runs: at most two minutes on two cores for all of a paper."""
    processes: int
    on_done: OnDone | None = None

    @property
    def plots(self) -> Path:
        """The folder for PNG files; it exists."""
        return self.out / PLOTS_FOLDER

    def trace(self, name: str) -> str:
        """Path of a trace, e.g. `azure2023_code.csv.gz`. Raises `ConfigurationError` where there is none."""
        return str(self.data_file(f"traces/{name}"))

    def data_file(self, name: str) -> Path:
        """A file of the data folder. Raises `ConfigurationError` where there is none."""
        path = self.data / name
        if not path.is_file():
            raise ConfigurationError(
                f"the data folder {self.data} has no {name}; give the folder that has, with --data"
            )
        return path

    def run_jobs(self, jobs: Mapping[str, Callable[[], Result]]) -> dict[str, Result]:
        """See `parallel.run_jobs`: the processes and the progress of this run."""
        return run_jobs(jobs, self.processes, self.on_done)


def reproduce(paper: str, run: ReproductionRun) -> ReproductionReport:
    """Measure, and write `report.json`, `report.md` and `plots/` into `run.out`.

    Raises `ConfigurationError` for an unknown paper, lacking data or a folder that cannot be written.
    """
    measure = load(paper)
    _make_folders(run)
    started_s = time.perf_counter()
    findings = measure(run)
    report = ReproductionReport(
        paper=paper,
        rows=findings.rows,
        seed=run.seed,
        seconds=round(time.perf_counter() - started_s, 1),
        quick=run.quick,
    )
    (run.out / REPORT_FILE).write_bytes(encode_report(report))
    (run.out / PAGE_FILE).write_text(page(report, findings, title_of(paper), _command(paper, run)))
    return report


def _make_folders(run: ReproductionRun) -> None:
    try:
        run.plots.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot write into {run.out}: {error}; give another folder with --out") from error


def _command(paper: str, run: ReproductionRun) -> str:
    quick = " --quick" if run.quick else ""
    return f"penstock reproduce {paper} --data DATA --out OUT --seed {run.seed}{quick}"
