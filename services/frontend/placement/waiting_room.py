"""New requests for which there is no instance just now: they wait, but only so many."""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from services.frontend.errors import ApiError, stopped, too_many_requests
from services.frontend.metrics import PlacementMetrics

log = logging.getLogger(__name__)

RETRY_AFTER_S: Final = 5.0
"""About as long as a worker takes to restart."""


class WaitingRoom:
    """Counts who comes and who waits, by model, and says in the log when the first waits and when none does."""

    def __init__(self, max_waiting: int, metrics: PlacementMetrics) -> None:
        self._max_waiting = max_waiting
        self._metrics = metrics
        self._waiting: Counter[str] = Counter()
        self._arrivals: Counter[str] = Counter()
        self.is_closed = False
        """The process stops: nobody is to wait any longer."""
        metrics.waiting.set_function(lambda: len(self))

    def __len__(self) -> int:
        return self._waiting.total()

    def came(self, model: str) -> None:
        """A new request for the model, whether it has to wait or not."""
        self._arrivals[model] += 1

    def demand(self) -> Iterator[tuple[str, int, int]]:
        """Model, how many requests came for it in all, and how many wait now: also such that are not counted as come,
        because no instance has ever told this frontend of the model."""
        models = sorted(self._arrivals.keys() | self._waiting.keys())
        return ((model, self._arrivals[model], self._waiting[model]) for model in models)

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
