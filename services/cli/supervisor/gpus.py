"""Which GPUs of this machine each instance gets."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence

from mesh.errors import ConfigurationError

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
    """Hands out GPUs by number. A machine without any hands out nothing, and instances run on its CPU."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count))
        self._taken: dict[str, list[int]] = {}

    def take(self, name: str, gpus: int) -> Mapping[str, str]:
        """The environment of the instance `name`. Raises `ConfigurationError` where too few are left."""
        if not self._count:
            return {}
        if not self.has_room(gpus):
            raise ConfigurationError(
                f"{name} needs {gpus} of this machine's {self._count} GPUs, of which {len(self._free)} are free: start "
                "fewer instances, or narrower ones"
            )
        taken, self._free = self._free[:gpus], self._free[gpus:]
        self._taken[name] = taken
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, taken))}

    def has_room(self, gpus: int, ended: Sequence[str] = ()) -> bool:
        """Whether an instance could take so many once those named have ended."""
        freed = sum(len(self._taken.get(name, ())) for name in ended)
        return not self._count or gpus <= len(self._free) + freed

    def give_back(self, name: str) -> None:
        """The instance has ended."""
        self._free = sorted([*self._free, *self._taken.pop(name, [])])
