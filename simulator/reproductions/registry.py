"""The papers by the name that `penstock reproduce` takes, and how one is reproduced. A paper's module is imported when
it is asked for."""

import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mesh.errors import ConfigurationError
from simulator.reproductions.page import page
from simulator.reproductions.report import Findings, ReproductionReport, encode_report
from simulator.reproductions.run import ReproductionRun

REPORT_FILE = "report.json"
PAGE_FILE = "report.md"


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper's name, title and the module that reproduces it."""

    module: str
    """Has `reproduce(run: ReproductionRun) -> Findings`."""
    title: str

    def load(self) -> Callable[[ReproductionRun], Findings]:
        """Import the module; its function."""
        measure: Callable[[ReproductionRun], Findings] = importlib.import_module(self.module).reproduce
        return measure


PAPERS: Mapping[str, Paper] = MappingProxyType(
    {
        "arrow": Paper("simulator.reproductions.arrow.reproduction", "Arrow: adaptive prefill and decode pools"),
        "cascadeinfer": Paper("simulator.reproductions.cascadeinfer.findings", "CascadeInfer: length-aware stages"),
        "cascadia": Paper("simulator.reproductions.cascadia.reproduction", "Cascadia: plans of a cascade of models"),
        "lmetric": Paper("simulator.reproductions.lmetric.reproduction", "LMetric: placement by a product"),
        "star": Paper("simulator.reproductions.star.reproduction", "STAR: decode-phase rescheduling"),
    }
)


def reproduce(paper: str, run: ReproductionRun) -> ReproductionReport:
    """Measure, and write `report.json`, `report.md` and `plots/` into `run.out`.

    Raises `ConfigurationError` for an unknown paper, lacking data or a folder that cannot be written.
    """
    if paper not in PAPERS:
        known = ", ".join(PAPERS) or "none"
        raise ConfigurationError(f"there is no reproduction of {paper!r}; papers that can be reproduced: {known}")
    registered = PAPERS[paper]
    measure = registered.load()
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
    (run.out / PAGE_FILE).write_text(page(report, findings, registered.title, _command(paper, run)))
    return report


def _make_folders(run: ReproductionRun) -> None:
    try:
        run.plots.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot write into {run.out}: {error}; give another folder with --out") from error


def _command(paper: str, run: ReproductionRun) -> str:
    quick = " --quick" if run.quick else ""
    return f"penstock reproduce {paper} --data DATA --out OUT --seed {run.seed}{quick}"
