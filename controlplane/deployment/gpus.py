"""Which GPUs of one machine each instance gets, or how many of a cluster that chooses them itself. Pure."""

from collections.abc import Mapping

from controlplane.deployment.replicas import Shape, gpus_of
from mesh.errors import ConfigurationError
from mesh.invariants import invariants

CPU_PLACES = 64
"""Instances that a machine without GPUs takes."""


class GpuPool:
    """Hands out GPUs by number. A machine without any has places on its CPU, and whoever asks gets one."""

    def __init__(
        self, count: int, cpu_places: int = CPU_PLACES, cores: int = 1, places: str = "places on the CPU"
    ) -> None:
        """`cores`: of each instance, by data parallelism; each spans as many GPUs as its shape says. `places`: what the
        user calls the places of instances that are given no GPUs by number."""
        self._count = count
        self._cores = cores
        self._cpu_places = cpu_places
        self._places = places
        self._free = list(range(count))
        self._taken: dict[str, list[int]] = {}

    @property
    def free(self) -> int:
        """GPUs, or places on the CPU, that no instance has."""
        return len(self._free) if self._count else max(0, self._cpu_places - len(self._taken))

    @property
    def unit(self) -> str:
        """What `free` counts, in words for the user."""
        return "GPUs" if self._count else self._places

    def room_of(self, shape: Shape) -> int:
        """How many of `free` an instance of this shape takes."""
        return gpus_of(shape) * self._cores if self._count else 1

    def take(self, name: str, gpus: int) -> Mapping[str, str]:
        """The environment of the instance `name`. Raises `ConfigurationError` where too few are left."""
        if not self._count:
            self._taken[name] = []
            return {}
        if gpus > len(self._free):
            raise ConfigurationError(
                f"{name} needs {gpus} of {self._count} GPUs here, of which {len(self._free)} are free: start fewer "
                "instances, or narrower ones"
            )
        taken, self._free = self._free[:gpus], self._free[gpus:]
        self._taken[name] = taken
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, taken))}

    @property
    def holders(self) -> frozenset[str]:
        """Names of the instances that have GPUs, or places."""
        return frozenset(self._taken)

    @invariants
    def validate(self) -> None:
        """Check that every GPU is either free or one instance's. Raises `InvariantBroken`."""
        held = sorted([*self._free, *(gpu for gpus in self._taken.values() for gpu in gpus)])
        assert held == list(range(self._count)), f"{self._count} GPUs, of which these are free or held: {held}"

    def give_back(self, name: str) -> None:
        """An instance has ended: its GPUs are free again. No effect for one that has none."""
        self._free = sorted([*self._free, *self._taken.pop(name, [])])
