"""`--since`: from when on records are shown."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import click

_AGO: Final = re.compile(r"(\d{1,6})([smhd])")
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def parse_since(text: str, now: datetime) -> datetime:
    """A time ago, such as 90m or 7d, or a moment as ISO 8601 writes it, by default in UTC. Raises ValueError."""
    ago = _AGO.fullmatch(text)
    if ago is not None:
        return now - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


class Since(click.ParamType[datetime]):
    """An option's value as a `datetime` with a time zone."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        """Of the text."""
        if isinstance(value, datetime):
            return value
        try:
            return parse_since(str(value), datetime.now(UTC))
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no time: say how long ago, such as 90m or 7d, or 2027-12-31T08:00", param, ctx)


since_option = click.option(
    "--since", type=Since(), help="Only from then on: a time ago, such as 90m, 24h or 7d, or a moment (UTC)."
)
