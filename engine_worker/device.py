"""What an engine runs on: the name that profiles are kept under, and what KV copies ask of a GPU."""

import logging
import platform
import subprocess
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)

_SMI_TIMEOUT_S = 10.0


class Mark(Protocol):
    """A point in the work of a stream (an event of CUDA)."""

    def query(self) -> bool:
        """Whether all work up to it is done."""


class Accelerator(Protocol):
    """A GPU, as KV copies see it: what is begun here goes to a stream of its own, beside the engine's."""

    def use_in_this_thread(self) -> None:
        """Make it the calling thread's GPU. Called once in the thread that copies, before anything else there."""

    def mark_engine(self) -> Mark:
        """The point that the engine's own stream has got to. Called in the engine's thread."""

    def mark_copies(self) -> Mark:
        """The point after all copies that were begun so far."""

    def device_buffer(self, nbytes: int) -> Any:
        """Bytes in the GPU's memory."""

    def pinned_buffer(self, nbytes: int) -> Any:
        """Bytes in page-locked host memory, as a NumPy array."""

    def gather_rows(self, source: Any, rows: NDArray[np.int64], into: Any) -> None:
        """Begin to copy rows of an array in the GPU's memory, one after another, into a buffer of either kind. A row
        may be a matrix, and may have gaps."""

    def scatter_rows(self, content: Any, rows: NDArray[np.int64], target: Any) -> None:
        """Begin to copy a buffer of either kind into rows of an array in the GPU's memory."""


def cpu_device() -> str:
    """`cpu-` and the machine's architecture, as profiles name a device."""
    return f"cpu-{platform.machine()}"


def vllm_device() -> str:
    """That, or the name of the first GPU where vLLM is installed for one. May block for `_SMI_TIMEOUT_S`."""
    from engine_worker.engines.vllm.environment import installed_device

    return cpu_device() if installed_device() == "cpu" else _first_gpu()


def _first_gpu() -> str:
    """Asked of the driver's own tool: torch would initialise CUDA in a process that has no use for it."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True)
        return told.stdout.splitlines()[0].strip().replace(" ", "-")
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        log.warning("the GPU's name is not known: profiles are kept under 'gpu'", extra={"error": str(error)})
        return "gpu"
