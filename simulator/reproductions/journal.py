"""Results of jobs in a file, added as they come: a run takes hours, and one that was stopped goes on from there."""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec

from simulator.reproductions.parallel import OnDone, run_jobs

Result = TypeVar("Result")
Fingerprint = Callable[[Callable[[], Any]], str]
"""Of all that a job has the same result with, besides its name."""


def run_noted(
    jobs: Mapping[str, Callable[[], Result]],
    processes: int,
    on_done: OnDone | None,
    journal: Path,
    fingerprint: Fingerprint,
) -> dict[str, Result]:
    """As `run_jobs`, but what the journal has is not run again. Jobs are `functools.partial` of types, or of functions
    whose annotation says what they return."""
    noted = _read(journal)
    known: dict[str, Result] = {}
    for name, job in jobs.items():
        if (line := noted.get((fingerprint(job), name))) is not None:
            # Of another version, a result may have other fields: then it is measured anew.
            with suppress(msgspec.ValidationError):
                known[name] = msgspec.json.decode(line, type=_kind(job))
    left = {
        name: partial(_noted, journal, fingerprint(job), name, job) for name, job in jobs.items() if name not in known
    }
    results = run_jobs(left, processes, on_done)
    return {name: known[name] if name in known else results[name] for name in jobs}


def arguments_fingerprint(job: Callable[[], Any]) -> str:
    """Of the function and its arguments, as they print: plain values throughout."""
    assert isinstance(job, partial), "jobs travel to other processes"
    named = f"{job.func.__module__}.{job.func.__qualname__}{job.args!r}{job.keywords!r}"
    return hashlib.sha256(named.encode()).hexdigest()[:16]


class _JournalLine(msgspec.Struct, frozen=True):
    suite: str
    job: str
    result: msgspec.Raw


def _read(path: Path) -> dict[tuple[str, str], msgspec.Raw]:
    """Nothing where there is no file yet. A line that was cut off by whoever stopped the run is left out."""
    known: dict[tuple[str, str], msgspec.Raw] = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(msgspec.DecodeError):
            entry = msgspec.json.decode(line, type=_JournalLine)
            known[entry.suite, entry.job] = entry.result
    return known


def _kind(job: Callable[[], Any]) -> Any:
    assert isinstance(job, partial), "jobs travel to other processes"
    return job.func if isinstance(job.func, type) else get_type_hints(job.func)["return"]


def _noted(journal: Path, fingerprint: str, name: str, job: Callable[[], Result]) -> Result:
    """The job's result, written down."""
    result = job()
    line = msgspec.json.encode(_JournalLine(fingerprint, name, msgspec.Raw(msgspec.json.encode(result)))) + b"\n"
    with journal.open("ab", buffering=0) as file:  # one write: other processes write, too
        file.write(line)
    return result
