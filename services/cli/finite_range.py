"""Click types of numbers that refuse nan and infinity."""

import math
from typing import Any

import click


class FiniteRange(click.FloatRange):
    """click's range of numbers, without nan: it is neither below nor above a bound, so click lets it pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, if it is one within the range."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


POSITIVE = FiniteRange(min=0, min_open=True, max=1e6)
"""Positive and no more than a million."""
