"""How many GPUs this machine has."""

import shutil
import subprocess

LIST_TIMEOUT_S = 10.0


def count_gpus() -> int:
    """NVIDIA GPUs of this machine; 0 where there is no driver."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return 0
    try:
        listed = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=LIST_TIMEOUT_S, check=True)
    except (subprocess.SubprocessError, OSError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
