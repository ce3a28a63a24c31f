"""LoRA adapters: what a request says of the one that it is for, and what the mesh knows of each."""

from dataclasses import dataclass
from typing import Final

import msgspec

from mesh.errors import ConfigurationError

ADAPTERS_PREFIX: Final = "/penstock/adapters/"
"""In the state store: one key for each adapter that was loaded at run time, by its name."""
MAX_ADAPTERS: Final = 1024
"""That the mesh knows at once."""
MAX_NAME_CHARACTERS: Final = 256


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter, whole: an instance that has never heard of it can load it from this."""

    name: str
    """What clients ask for as `model`."""
    digest: str
    """Checksum of its files, as hexadecimal digits. What an instance has loaded, and which KV blocks it may share, goes
    by this, so that an adapter that was trained on is another one under the same name."""
    path: str
    """Directory with adapter_config.json and the weights, on the machines of the instances."""
    is_3d_lora_weight: bool = False
    """vLLM's: how the weights of a mixture of experts are laid out."""


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """The adapters of an instance, by digest."""

    in_use: tuple[str, ...] = ()
    """Of requests that are there."""
    idle: tuple[str, ...] = ()
    """Loaded besides: a request for one of them waits for no file."""
    refused: tuple[str, ...] = ()
    """That could not be loaded a moment ago."""


NO_ADAPTERS: Final = AdapterLoad()


class AdapterRecord(msgspec.Struct, frozen=True):
    """What the state store says of an adapter, under its name."""

    base_model: str
    path: str
    digest: str
    created_unix_s: int = 0
    is_3d_lora_weight: bool = False

    def adapter(self, name: str) -> Adapter:
        """The adapter itself."""
        return Adapter(name, self.digest, self.path, self.is_3d_lora_weight)


class StaticAdapter(msgspec.Struct, frozen=True):
    """An adapter that a worker was started with (`lora_modules`), as it announces it."""

    name: str
    path: str
    digest: str
    is_3d_lora_weight: bool = False


def check_record(record: AdapterRecord) -> None:
    """Raises ConfigurationError for one that nobody could load."""
    if not (record.base_model and record.path and record.digest):
        raise ConfigurationError("an adapter needs a base_model, a path and a digest")
