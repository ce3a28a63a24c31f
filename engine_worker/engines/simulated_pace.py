"""How fast a simulated engine runs, which can be changed while it does."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

Pace = Callable[[], float]
"""What multiplies the duration of the step that begins."""


def steady() -> float:
    """As the cost model says."""
    return 1.0


class PaceFile:
    """A number in a file, read again whenever the file has changed: 20 is twenty times as slow as the cost model, 0.1
    ten times as fast, and without a file it is 1.

    So a machine that throttles can be played, and requests can be held until they have been moved. What is no positive
    number or cannot be read changes nothing, and a warning says so.
    """

    def __init__(self, path: str) -> None:
        self._path: Final = Path(path)
        self._pace = 1.0
        self._seen: tuple[int, int] | None = None

    def __call__(self) -> float:
        try:
            stat = self._path.stat()
            seen = stat.st_mtime_ns, stat.st_ino
            if seen != self._seen:
                self._seen = seen
                self._read()
        except FileNotFoundError:
            self._pace, self._seen = 1.0, None
        except OSError as error:
            log.warning("the pace cannot be read, so the last one stays", extra={"error": str(error)})
        return self._pace

    def _read(self) -> None:
        text = self._path.read_text(errors="replace").strip()
        try:
            pace = float(text)
        except ValueError:
            pace = math.nan
        if 0 < pace < math.inf:
            self._pace = pace
        else:
            log.warning("this is no pace, so the last one stays", extra={"path": str(self._path), "text": text[:100]})
