"""Progress of simulations, on stderr."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from services.cli.time_columns import time_columns
from simulator.reproductions.parallel import OnDone


@contextmanager
def progress_bars(names: Iterable[str], requests_total: int) -> Iterator[Callable[[str, int], None]]:
    """A function that takes a name and how many requests have ended. Drawn on stderr, where that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *time_columns())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bars = {name: progress.add_task(name, total=requests_total) for name in names}
        yield lambda name, ended: progress.update(bars[name], completed=ended)


@contextmanager
def job_progress(title: str) -> Iterator[OnDone]:
    """For jobs one after the other: a bar on a terminal, otherwise a line for each that is done; on stderr."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *time_columns())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(title, total=None)

        def on_done(name: str, done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total, description=f"{title}: {name}")
            if not console.is_terminal:
                click.echo(f"{title}: {done} of {total} done: {name}", err=True)

        yield on_done
