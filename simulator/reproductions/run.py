"""What one run of a reproduction is given."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from mesh.errors import ConfigurationError
from simulator.reproductions.journal import arguments_fingerprint, run_noted
from simulator.reproductions.parallel import OnDone, run_jobs

Result = TypeVar("Result")

PLOTS_FOLDER = "plots"


class EngineEra(StrEnum):
    """The release of vLLM whose admission the modelled engines have."""

    VLLM_0_9 = "0.9"
    """A request is admitted where its first chunk fits."""
    CURRENT = "current"
    """A request is admitted where its whole prompt fits: vLLM's default now."""

    @property
    def admission(self) -> str:
        """The name under which tables and plots show it."""
        return "vLLM 0.9's admission" if self is EngineEra.VLLM_0_9 else "today's admission"


@dataclass(frozen=True, slots=True)
class ReproductionRun:
    """What a paper's module is given: its data, folders, and workers for its runs."""

    data: Path
    """Folder of the data sets, with `traces/`, `lengths/`, `quality/` and `profiles/`."""
    out: Path
    seed: int
    quick: bool
    """Give the same rows from shorter runs: a few minutes on two cores for all of a paper."""
    processes: int
    on_done: OnDone | None = None
    engine_era: EngineEra = EngineEra.CURRENT
    """Only for papers that say they have eras (`Paper.has_eras`)."""
    journal: Path | None = None
    """Results are added to this file as they come, and those that it has of the same jobs are not measured again. Only
    for papers that say so (`Paper.keeps_journal`)."""

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
        """See `parallel.run_jobs`: the processes, the progress and the journal of this run."""
        if self.journal is not None:
            return run_noted(jobs, self.processes, self.on_done, self.journal, arguments_fingerprint)
        return run_jobs(jobs, self.processes, self.on_done)
