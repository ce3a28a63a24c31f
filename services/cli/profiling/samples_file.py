"""What has been measured so far, a configuration a line, so that an interrupted profile goes on where it was."""

from pathlib import Path

import msgspec

from controlplane.planning.cascade.replica import ReplicaShape
from controlplane.planning.instance_profile import InstanceSizes
from mesh.errors import ConfigurationError
from services.cli.profiling.closed_loop import Measured
from services.cli.profiling.plan import Configuration, ProfileBounds


class ProfiledInstance(msgspec.Struct, frozen=True):
    """The instance whose samples a file holds, and the bounds within which they were taken."""

    engine: str
    model: str
    device: str
    sizes: InstanceSizes
    bounds: ProfileBounds
    shape: ReplicaShape | None = None
    """None: from a time when this was not noted."""


class SamplesFile:
    """JSON lines: the instance, then what was measured. A last line that was cut off is dropped."""

    def __init__(self, path: Path, profiled: ProfiledInstance) -> None:
        """Raises `ConfigurationError` where the file holds samples of something else."""
        self._path = path
        self.measured: dict[Configuration, Measured] = {}
        if path.exists():
            self._read(profiled)
        self._write_all(profiled)

    def add(self, measured: Measured) -> None:
        """Keep one configuration's samples: append them to the file at once."""
        self.measured[measured.configuration] = measured
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(measured) + b"\n")

    def _read(self, profiled: ProfiledInstance) -> None:
        head, *lines = self._path.read_bytes().split(b"\n")
        try:
            found = msgspec.json.decode(head, type=ProfiledInstance)
        except msgspec.MsgspecError as error:
            raise ConfigurationError(f"{self._path} holds no samples of a profile ({error}); remove it") from error
        if found.shape is None:
            # Of an instance of the same sizes: they would differ if it had been cut over other GPUs.
            found = msgspec.structs.replace(found, shape=profiled.shape)
        if found != profiled:
            raise ConfigurationError(
                f"{self._path} holds samples of {found.engine} {found.model} on {found.device} "
                f"({found.shape or 'shape not noted'}) with {found.bounds}; "
                "give the same options, another --out, or --fresh to measure anew"
            )
        for line in lines:
            try:
                measured = msgspec.json.decode(line, type=Measured)
            except msgspec.MsgspecError:
                continue  # cut off by an interruption, or empty: measured again
            self.measured[measured.configuration] = measured

    def _write_all(self, profiled: ProfiledInstance) -> None:
        lines = [msgspec.json.encode(each) for each in (profiled, *self.measured.values())]
        self._path.write_bytes(b"\n".join(lines) + b"\n")
