"""Simulations of plans made short, for tests of what is made of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from simulator.cascade import curves, replica, saturated, steady
from simulator.cascade.make_plan import MadePlan, make_plan


@contextmanager
def short_runs() -> Iterator[pytest.MonkeyPatch]:
    """Curves have two points, and runs a few dozen requests: latencies are rough, and cheap."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "UTILISATIONS", (0.05, 0.9))
        for name, value in (("_MIN_BURST", 40), ("_MAX_BURST", 60), ("_MIN_COUNTED", 20), ("_MAX_WARM_UP", 20)):
            patch.setattr(replica, name, value)
        for name, value in (("_MIN_COUNTED", 40), ("_MIN_OF_A_TIER", 10), ("_MAX_COUNTED", 80), ("_MAX_UNCOUNTED", 40)):
            patch.setattr(steady, name, value)
        for name, value in (("_MIN_REQUESTS", 40), ("_MAX_REQUESTS", 60)):
            patch.setattr(saturated, name, value)
        yield patch


def make_short_plan(*args: Any) -> MadePlan:
    """`make_plan` with short runs, in a process that imports this."""
    with short_runs():
        return make_plan(*args)
