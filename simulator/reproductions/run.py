"""What one run of a reproduction is given."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mesh.errors import ConfigurationError
from simulator.reproductions.parallel import OnDone, run_jobs

Result = TypeVar("Result")

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
