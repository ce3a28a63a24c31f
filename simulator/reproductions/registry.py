"""The papers by the name that `penstock reproduce` takes. A paper's module is imported when it is asked for."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from mesh.errors import ConfigurationError

if TYPE_CHECKING:
    from simulator.reproductions.report import Findings
    from simulator.reproductions.run import ReproductionRun


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper's name, title and the module that reproduces it."""

    module: str
    """Has `reproduce(run: ReproductionRun) -> Findings`."""
    title: str


PAPERS: Mapping[str, Paper] = MappingProxyType(
    {
        "arrow": Paper("simulator.reproductions.arrow", "Arrow: adaptive prefill and decode pools"),
        "cascadeinfer": Paper("simulator.reproductions.cascadeinfer.findings", "CascadeInfer: length-aware stages"),
        "cascadia": Paper("simulator.reproductions.cascadia.reproduction", "Cascadia: plans of a cascade of models"),
        "lmetric": Paper("simulator.reproductions.lmetric.reproduction", "LMetric: placement by a product"),
        "star": Paper("simulator.reproductions.star.reproduction", "STAR: decode-phase rescheduling"),
    }
)


def title_of(paper: str) -> str:
    """The paper's title. Raises `ConfigurationError` for one that is not registered."""
    return _find(paper).title


def load(paper: str) -> "Callable[[ReproductionRun], Findings]":
    """Its module's function. Raises `ConfigurationError` for a paper that is not registered."""
    measure: Callable[[ReproductionRun], Findings] = importlib.import_module(_find(paper).module).reproduce
    return measure


def _find(paper: str) -> Paper:
    if paper not in PAPERS:
        known = ", ".join(PAPERS) or "none"
        raise ConfigurationError(f"there is no reproduction of {paper!r}; papers that can be reproduced: {known}")
    return PAPERS[paper]
