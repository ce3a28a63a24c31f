"""What a simulation must keep out of its process, and the process out of it: garbage collection and logs."""

import asyncio
import gc
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final

from fault_simulation.loop import FindingsHandler, VirtualLoop

COLLECT_EVERY_S: Final = 20.0
"""Garbage is collected at fixed moments of virtual time: where it holds a task that still waits, that is a finding, and
it must be the same one in each run."""


@cache
def set_imports_aside() -> None:
    """Have collections look at nothing that is there now: to look through all that a process has imported takes a tenth
    of a second. Once in a process, before its first simulation is made: what is set aside is never collected."""
    gc.collect()
    gc.freeze()


@contextmanager
def isolated(loop: VirtualLoop, told: logging.Handler | None = None) -> Iterator[None]:
    """Within it the loop may run. Afterwards it is closed and all that it kept is gone, unheard. `told` hears what the
    roles log."""
    root = logging.getLogger()
    handlers, level, disabled = root.handlers[:], root.level, logging.root.manager.disable
    was_enabled = gc.isenabled()
    gc.disable()
    logging.disable(logging.CRITICAL)
    with _unheard():
        gc.collect()  # the simulation before, which its caller has dropped by now
    root.handlers[:] = [FindingsHandler(loop), *([told] if told else [])]
    root.setLevel(told.level if told else logging.ERROR)
    logging.disable((told.level if told else logging.ERROR) - 1)
    try:
        yield
    finally:
        logging.disable(logging.CRITICAL)
        with _unheard():
            loop.close()
            gc.collect()
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.disable(disabled)
        if was_enabled:
            gc.enable()


@contextmanager
def _unheard() -> Iterator[None]:
    """What is dropped within it may complain to nobody: coroutines that are closed in the middle of something."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.unraisablehook = hook


async def collect_garbage() -> None:
    """For ever, in the world."""
    while True:
        await asyncio.sleep(COLLECT_EVERY_S)
        gc.collect()
