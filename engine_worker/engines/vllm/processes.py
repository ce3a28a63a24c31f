"""One AsyncLLM and its processes, as the engines share them: one engine, or with data parallelism one for each core."""

import asyncio
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from engine_worker.engines.vllm.adapters import VllmAdapters
from engine_worker.engines.vllm.connector.endpoint import of_core
from engine_worker.engines.vllm.environment import (
    WORKER_PID_VARIABLE,
    engine_environment,
    installed_device,
    set_missing,
)
from engine_worker.engines.vllm.host_tier import VllmHostTier
from engine_worker.engines.vllm.load import StepStats
from engine_worker.engines.vllm.migrations import migration_obstacle
from engine_worker.engines.vllm.settings import VllmSettings

if TYPE_CHECKING:
    from engine_worker.engines.vllm.core import Core

log = logging.getLogger(__name__)


class VllmProcesses:
    """Started by the first engine that asks for its core, and stopped by the first engine, which must be the last to
    stop."""

    def __init__(self, settings: VllmSettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        # The kernel ends the core when the thread that started it does (see `plugin`), so that thread must live.
        self._launcher = ThreadPoolExecutor(1, thread_name_prefix="vllm-launcher")
        self._socket_dir: Path | None = None
        self._core: Core | None = None
        self._on_step: dict[int, Callable[[StepStats], None]] = {}
        self.obstacle: str | None = None
        """Why requests of these engines cannot move; None if they can."""
        self.loras = VllmAdapters(settings.lora_modules, clock, self._launcher)
        """vLLM loads each in all cores."""

    def prepare(self) -> None:
        """Set the environment that vLLM is imported in, and find out what will be in the way. May be called again."""
        if self._socket_dir is not None:
            return
        device = installed_device()
        set_missing(os.environ, engine_environment(self._settings, device))
        os.environ[WORKER_PID_VARIABLE] = str(os.getpid())
        self._socket_dir = Path(tempfile.mkdtemp(prefix="penstock-"))
        self.obstacle = migration_obstacle(self._settings, device)
        if self.obstacle is not None and self._settings.movable:
            log.warning("requests of this engine cannot move", extra={"reason": self.obstacle})

    def endpoint(self, name: str, core: int = 0) -> str:
        """Of a socket of a core's. vLLM tells the cores' KV events apart where the endpoint is TCP's or has "inproc" in
        it (0.32), and by this suffix."""
        assert self._socket_dir is not None, "prepared before it is asked"
        return of_core(f"ipc://{self._socket_dir}/inproc-{name}", core)

    async def core(self, core: int, on_step: Callable[[StepStats], None], host: VllmHostTier) -> "Core":
        """That of this number, as `Core` has it; its steps are told to `on_step`. Raises what `Core` raises."""
        self._on_step[core] = on_step
        if self._core is None:
            self._core = await asyncio.get_running_loop().run_in_executor(self._launcher, self._launch, host)
            self.loras.start(self._core)
        return self._core.of_rank(core)

    async def stop(self) -> None:
        """End the core processes."""
        if self._core is not None:
            self._core.stop_reading()
            stop = self._core.shutdown
            await asyncio.get_running_loop().run_in_executor(self._launcher, stop, self._settings.stop_timeout_s)
        self._launcher.shutdown(wait=False)
        if self._socket_dir is not None:
            shutil.rmtree(self._socket_dir, ignore_errors=True)

    def _launch(self, host: VllmHostTier) -> "Core":
        from engine_worker.engines.vllm.arguments import KvEndpoints
        from engine_worker.engines.vllm.core import Core

        moves = self.endpoint("moves") if self.obstacle is None else None
        endpoints = KvEndpoints(self.endpoint("events"), self.endpoint("replay"), moves, host.key(self.obstacle))
        return Core(self._settings, installed_device(), endpoints, self._stepped)

    def _stepped(self, core: int, stats: StepStats) -> None:
        if (on_step := self._on_step.get(core)) is not None:
            on_step(stats)
