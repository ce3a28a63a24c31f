"""A running server with data parallelism: an engine for each of its cores, and those as one."""

from collections.abc import AsyncIterator
from contextlib import aclosing

from engine_worker.engines.attached.client import ServerClient
from engine_worker.engines.attached.engine import AttachedEngine
from engine_worker.engines.attached.probe import MetricsReader
from engine_worker.engines.attached.settings import AttachedSettings
from engine_worker.engines.data_parallel import DataParallelEngine, merged
from engine_worker.engines.hidden_state_source import HiddenStates
from mesh.runtime import Clock


class DataParallelAttached(DataParallelEngine):
    """Implements besides `HiddenStateSource`. Requests go to a core by a header that names it; each core tells of its
    prefix cache, and has its control socket, one port further than the one before (`of_core`)."""

    def __init__(self, settings: AttachedSettings, clock: Clock) -> None:
        self._client = ServerClient(settings.url, settings.api_key, settings.answer_s)
        metrics = MetricsReader(self._client, clock, settings.poll_s / 2)
        engines = [AttachedEngine(settings, clock, core, metrics) for core in range(settings.data_parallel_size)]
        super().__init__(engines)
        self._engines = engines
        self._metrics = metrics

    @property
    def server_metrics(self) -> str:
        """See `ServedEngine`: those of all cores, by the label `engine`."""
        return self._metrics.latest_text

    async def stop(self) -> None:
        await super().stop()
        await self._client.close()

    async def capture_hidden_states(self, every_steps: int) -> str:
        """See `HiddenStateSource`. None are where a core has none."""
        reasons = [await engine.capture_hidden_states(every_steps) for engine in self._engines]
        return next(filter(None, reasons), "")

    async def hidden_states(self) -> AsyncIterator[HiddenStates]:
        """See `HiddenStateSource`: those of all cores."""
        async with aclosing(merged([engine.hidden_states() for engine in self._engines])) as told:
            async for _, states in told:
                yield states


def attached_engine(settings: AttachedSettings, clock: Clock) -> AttachedEngine | DataParallelAttached:
    """The engine of these settings. Raises `ConfigurationError`."""
    is_one = settings.data_parallel_size == 1
    return AttachedEngine(settings, clock) if is_one else DataParallelAttached(settings, clock)
