"""Progress bars of simulations, one for each."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress_bars(names: Iterable[str], requests_total: int) -> Iterator[Callable[[str, int], None]]:
    """A function that takes a name and how many requests have ended. Drawn on stderr, where that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bars = {name: progress.add_task(name, total=requests_total) for name in names}
        yield lambda name, ended: progress.update(bars[name], completed=ended)
