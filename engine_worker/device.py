"""What an engine runs on, by the name that profiles are kept under."""

import logging
import platform
import subprocess

log = logging.getLogger(__name__)

_SMI_TIMEOUT_S = 10.0


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
