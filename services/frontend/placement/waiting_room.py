"""New requests for which there is no instance just now: they wait, but only so many."""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from services.frontend.errors import ApiError, stopped, too_many_requests
from services.frontend.metrics import FrontendMetrics

log = logging.getLogger(__name__)

RETRY_AFTER_S: Final = 5.0
"""About as long as a worker takes to restart."""


class WaitingRoom:
    """Counts those who wait, by model, and says so in the log when the first comes and when the last has gone."""

    def __init__(self, max_waiting: int, metrics: FrontendMetrics) -> None:
        self._max_waiting = max_waiting
        self._metrics = metrics
        self._waiting: Counter[str] = Counter()
        self.is_closed = False
        """The process stops: nobody is to wait any longer."""
        metrics.waiting.set_function(lambda: len(self))

    def __len__(self) -> int:
        return self._waiting.total()

    @contextmanager
    def entered(self, model: str, reason: ApiError) -> Iterator[None]:
        """Wait inside, for the `reason`. Raises ApiError: 429 if too many wait already, 503 once closed."""
        if self.is_closed:
            raise stopped()
        if len(self) >= self._max_waiting:
            self._metrics.refused_waits.inc()
            raise too_many_requests(
                f"{reason} {len(self)} requests wait for an instance already; try again later.",
                "no_instance",
                RETRY_AFTER_S,
            ) from reason
        if not self._waiting[model]:
            log.error("requests wait for an instance", extra={"model": model, "reason": str(reason)})
        self._waiting[model] += 1
        try:
            yield
        finally:
            self._waiting[model] -= 1
            if not self._waiting[model]:
                del self._waiting[model]
                log.warning("no request waits for an instance any more", extra={"model": model})
