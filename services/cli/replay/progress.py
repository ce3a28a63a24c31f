"""The progress bar of a replay."""

import asyncio

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from services.cli.replay.open_loop import ReplayLog

REFRESH_S = 0.25


async def show_progress(log: ReplayLog, requests_total: int) -> None:
    """Draw until cancelled, on stderr and only where that is a terminal.

    Reads the log four times a second instead of being told of every token: drawing must cost the load
    generator next to nothing.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        return
    columns = (
        TextColumn("replaying"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("ended, {task.fields[in_flight]} in flight, {task.fields[errors]} errors"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        bar = progress.add_task("", total=requests_total, in_flight=0, errors=0)
        try:
            while True:
                progress.update(bar, completed=len(log.outcomes), in_flight=log.in_flight, errors=log.errors)
                progress.refresh()
                await asyncio.sleep(REFRESH_S)
        finally:
            progress.update(bar, completed=len(log.outcomes), in_flight=log.in_flight, errors=log.errors)
            progress.refresh()
