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
from simulator.reproductions.run import EngineEra, ReproductionRun

REPORT_FILE = "report.json"
PAGE_FILE = "report.md"


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper's name, title and the module that reproduces it."""

    module: str
    """Has `reproduce(run: ReproductionRun) -> Findings`."""
    title: str
    has_eras: bool = False
    """Whether its runs depend on `ReproductionRun.engine_era`."""
    keeps_journal: bool = False
    """Whether its results can be written down as JSON, and read again."""

    def load(self) -> Callable[[ReproductionRun], Findings]:
        """Import the module; its function."""
        measure: Callable[[ReproductionRun], Findings] = importlib.import_module(self.module).reproduce
        return measure


PAPERS: Mapping[str, Paper] = MappingProxyType(
    {
        "arrow": Paper(
            "simulator.reproductions.arrow.reproduction", "Arrow: adaptive prefill and decode pools", keeps_journal=True
        ),
        "cascadeinfer": Paper("simulator.reproductions.cascadeinfer.findings", "CascadeInfer: length-aware stages"),
        "cascadia": Paper(
            "simulator.reproductions.cascadia.reproduction",
            "Cascadia: plans of a cascade of models",
            keeps_journal=True,
        ),
        "lmetric": Paper(
            "simulator.reproductions.lmetric.reproduction", "LMetric: placement by a product", keeps_journal=True
        ),
        "star": Paper(
            "simulator.reproductions.star.reproduction",
            "STAR: decode-phase rescheduling",
            has_eras=True,
            keeps_journal=True,
        ),
    }
)


def reproduce(paper: str, run: ReproductionRun) -> ReproductionReport:
    """Measure, and write `report.json`, `report.md` and `plots/` into `run.out`.

    Raises `ConfigurationError` for an unknown paper, an era or a journal that the paper has not, lacking data or
    a folder that cannot be written.
    """
    if paper not in PAPERS:
        known = ", ".join(PAPERS) or "none"
        raise ConfigurationError(f"there is no reproduction of {paper!r}; papers that can be reproduced: {known}")
    registered = PAPERS[paper]
    if run.engine_era is not EngineEra.CURRENT and not registered.has_eras:
        known = ", ".join(name for name, each in PAPERS.items() if each.has_eras)
        raise ConfigurationError(
            f"the reproduction of {paper} has no engine of another era; leave --engine-era out, or take one of: {known}"
        )
    if run.journal is not None and not registered.keeps_journal:
        known = ", ".join(name for name, each in PAPERS.items() if each.keeps_journal)
        raise ConfigurationError(
            f"the reproduction of {paper} keeps no journal; leave --journal out, or take one of: {known}"
        )
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
    era = "" if run.engine_era is EngineEra.CURRENT else f" --engine-era {run.engine_era}"
    return f"penstock reproduce {paper} --data DATA --out OUT --seed {run.seed}{quick}{era}"
