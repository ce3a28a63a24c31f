"""What every progress bar says of time."""

from rich.progress import ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def time_columns() -> tuple[ProgressColumn, ...]:
    """How long it has taken, and how long it is still expected to take."""
    return TimeElapsedColumn(), TextColumn("gone,"), TimeRemainingColumn(), TextColumn("left")
