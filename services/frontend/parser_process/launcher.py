"""How a frontend starts its parser process; a test starts another one."""

import asyncio
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Protocol

from mesh.errors import ConfigurationError
from mesh.parent_death import PARENT_VARIABLE

_ENVIRONMENT: Final = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # what a context may be is the worker's to say
}


class Launched(Protocol):
    """A process that was started."""

    @property
    def pid(self) -> int:
        """Its process id."""

    async def wait(self) -> int:
        """Return its exit status once it has ended, negative for the signal that ended it."""

    def kill(self) -> None:
        """End it at once; no effect on one that has ended."""


class Launcher(Protocol):
    """Starts parser processes, one after the other, on this machine."""

    def check(self) -> None:
        """Raises ConfigurationError where it can start none, with what to do."""

    @property
    def folder(self) -> Path:
        """Where the files of models are put for it; nobody else's."""

    async def launch(self, socket: str) -> Launched:
        """Returns once it runs; it answers at the socket later. Raises OSError where it cannot be started."""

    def close(self) -> None:
        """Remove the folder."""


class ModuleLauncher:
    """Runs a Python module with the socket as its argument."""

    def __init__(self, module: str = "services.parser", needs: str = "vllm") -> None:
        """`needs`: a package without which it cannot run."""
        self._module = module
        self._needs = needs
        self._folder: TemporaryDirectory[str] | None = None

    def check(self) -> None:
        """See `Launcher`."""
        if find_spec(self._needs) is None:
            raise ConfigurationError(
                f"this takes vLLM's own parts, and {self._needs} is not installed where the frontend runs: install it "
                "there (`pip install vllm==0.32.*`, or scripts/install_engine.sh on a machine without a GPU); "
                "docs/vllm_parts.md says what they are for"
            )

    @property
    def folder(self) -> Path:
        """See `Launcher`."""
        if self._folder is None:
            self._folder = TemporaryDirectory(prefix="penstock-parser-")
        return Path(self._folder.name)

    async def launch(self, socket: str) -> Launched:
        """See `Launcher`."""
        environment = {**os.environ, **_ENVIRONMENT, PARENT_VARIABLE: str(os.getpid())}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", self._module, socket, env=environment, stdin=asyncio.subprocess.DEVNULL
        )
        return _Child(process)

    def close(self) -> None:
        """See `Launcher`."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class _Child:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        return await self._process.wait()

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
