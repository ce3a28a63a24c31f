"""Which GPUs of this machine each instance gets."""

import shutil
import subprocess
from collections.abc import Mapping

from mesh.errors import ConfigurationError
from services.cli.supervisor.local_mesh import MAX_WORKERS
from services.cli.supervisor.replicas import Shape, gpus_of

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


class GpuPool:
    """Hands out GPUs by number. A machine without any has places on its CPU, and whoever asks gets one."""

    def __init__(self, count: int, cpu_places: int = MAX_WORKERS) -> None:
        self._count = count
        self._cpu_places = cpu_places
        self._free = list(range(count))
        self._taken: dict[str, list[int]] = {}

    @property
    def free(self) -> int:
        """GPUs, or places on the CPU, that no instance has."""
        return len(self._free) if self._count else max(0, self._cpu_places - len(self._taken))

    @property
    def unit(self) -> str:
        """What `free` counts."""
        return "GPUs" if self._count else "places on the CPU"

    def room_of(self, shape: Shape) -> int:
        """How many of `free` an instance of this shape takes."""
        return gpus_of(shape) if self._count else 1

    def take(self, name: str, gpus: int) -> Mapping[str, str]:
        """The environment of the instance `name`. Raises `ConfigurationError` where too few are left."""
        if not self._count:
            self._taken[name] = []
            return {}
        if gpus > len(self._free):
            raise ConfigurationError(
                f"{name} needs {gpus} of this machine's {self._count} GPUs, of which {len(self._free)} are free: start "
                "fewer instances, or narrower ones"
            )
        taken, self._free = self._free[:gpus], self._free[gpus:]
        self._taken[name] = taken
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, taken))}

    def give_back(self, name: str) -> None:
        """The instance has ended."""
        self._free = sorted([*self._free, *self._taken.pop(name, [])])
