"""Which LoRA adapters an engine has loaded, and which of them requests use. Pure, but for the files' checksum."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

from xxhash import xxh3_128

from controlplane.model.adapter import NO_ADAPTERS, Adapter, AdapterLoad
from engine_worker.checkpoint_source import is_hugging_face_id, locate_files
from mesh.errors import AdapterNotFound, AdapterUnavailable, ConfigurationError
from mesh.invariants import invariants

CONFIG_FILE: Final = "adapter_config.json"
_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_PIECE_BYTES: Final = 4 * 1024 * 1024
REFUSED_FOR_S: Final = 10.0
"""How long nobody tries again to load an adapter that could not be, unless an operator has it loaded."""
MAX_REFUSED: Final = 64

ReadDigest = Callable[[str], str]
NumberedAdapter: TypeAlias = tuple[Adapter, int]
"""A LoRA adapter, and the number that an engine has it under."""


def adapter_digest(path: str) -> str:
    """32 hexadecimal digits over adapter_config.json and the weights: equal for copies of an adapter, different once it
    is trained on. Raises AdapterNotFound."""
    directory, digest = Path(path), xxh3_128()
    weights = [directory / name for name in _WEIGHTS if (directory / name).is_file()]
    if not weights or not (directory / CONFIG_FILE).is_file():
        missing = CONFIG_FILE if weights else _WEIGHTS[0]
        raise AdapterNotFound(f"there is no LoRA adapter at {path}: it has no {missing}")
    try:
        for file in (directory / CONFIG_FILE, *weights):
            digest.update(f"{file.name}:{file.stat().st_size}:".encode())
            with file.open("rb") as content:
                while piece := content.read(_PIECE_BYTES):
                    digest.update(piece)
    except OSError as error:
        raise AdapterNotFound(f"the LoRA adapter at {path} cannot be read: {error}") from error
    return digest.hexdigest()


def adapter_directory(path: str) -> str:
    """Where an adapter lies: at the path itself, or in the cache of the Hugging Face Hub, which has it fetched if it
    can. Raises AdapterNotFound."""
    if not is_hugging_face_id(path):
        return path
    try:
        return str(locate_files(path, (CONFIG_FILE, *_WEIGHTS)))
    except ConfigurationError as error:
        raise AdapterNotFound(f"there is no directory {path} here, and {error}") from error


def check_digest(adapter: Adapter, found: str) -> Adapter:
    """The adapter with the digest that was found at its path. Raises AdapterUnavailable where it was to be another."""
    if adapter.digest and adapter.digest != found:
        raise AdapterUnavailable(
            f"the LoRA adapter {adapter.name!r} has other files here than where it was loaded: at {adapter.path} they "
            f"have the checksum {found}, and {adapter.digest} is wanted; copy it anew, or load it in place"
        )
    return replace(adapter, digest=found)


def parse_modules(modules: str) -> tuple[Adapter, ...]:
    """The adapters of NAME=PATH,NAME=PATH. Raises ConfigurationError."""
    adapters: dict[str, Adapter] = {}
    for module in modules.split(",") if modules else ():
        name, equals, path = module.strip().partition("=")
        if not (name and equals and path):
            raise ConfigurationError(f"lora_modules={module}: an adapter is given as NAME=PATH")
        if name in adapters:
            raise ConfigurationError(f"lora_modules: two adapters have the name {name!r}")
        adapters[name] = Adapter(name, "", path)
    return tuple(adapters.values())


@dataclass(slots=True)
class _Loaded:
    adapter: Adapter
    number: int
    """Its own in this engine, from 1."""


class AdapterCache:
    """Loads are the engine's; this says which adapter makes room for another one."""

    def __init__(self, slots: int, capacity: int) -> None:
        """`slots`: adapters that one step serves; `capacity`: that may be loaded."""
        self.slots = slots
        self._capacity = max(slots, capacity)
        self._loaded: dict[str, _Loaded] = {}
        """By digest, the one whose last request is longest ago first."""
        self._users: dict[str, set[str]] = {}
        """Requests by digest; of adapters that are being loaded, too."""
        self._digests: dict[str, str] = {}
        """By request."""
        self._refused: dict[str, tuple[str, float]] = {}
        """By digest: why, and until when it counts."""
        self._numbers = 0

    def begin(self, request_id: str, adapter: Adapter | None, now_s: float) -> None:
        """A request comes that uses an adapter, loaded or not. Raises AdapterUnavailable where it cannot be loaded."""
        if adapter is None:
            return
        digest = adapter.digest
        if not self.slots:
            raise AdapterUnavailable("this instance serves no LoRA adapters: start it with enable_lora=true")
        reason, until_s = self._refused.get(digest, ("", now_s))
        if now_s < until_s:
            raise AdapterUnavailable(reason)
        if digest not in self._users and len(self._users) >= self._capacity:
            raise AdapterUnavailable(
                f"requests use {len(self._users)} LoRA adapters here, as many as the instance has room for"
            )
        self._users.setdefault(digest, set()).add(request_id)
        self._digests[request_id] = digest
        self.touch(digest)

    def end(self, request_id: str) -> None:
        """The request has left; ids of others are ignored."""
        digest = self._digests.pop(request_id, None)
        if digest is not None:
            self._users[digest].discard(request_id)
            if not self._users[digest]:
                del self._users[digest]

    def keep_only(self, request_ids: Collection[str]) -> None:
        """All other requests have left."""
        for request_id in [each for each in self._digests if each not in request_ids]:
            self.end(request_id)

    def number(self, digest: str) -> int | None:
        """The engine's own number of a loaded adapter; None if it is not loaded."""
        loaded = self._loaded.get(digest)
        return None if loaded is None else loaded.number

    def adapter(self, digest: str) -> Adapter:
        """A loaded adapter, as it was loaded. Raises KeyError."""
        return self._loaded[digest].adapter

    def touch(self, digest: str) -> None:
        """It was asked for just now."""
        if digest in self._loaded:
            self._loaded[digest] = self._loaded.pop(digest)

    def victim(self) -> int | None:
        """The number of the adapter to drop before one more is loaded; None while there is room. Raises
        AdapterUnavailable if all are in use."""
        if len(self._loaded) < self._capacity:
            return None
        for digest, loaded in self._loaded.items():
            if digest not in self._users:
                return loaded.number
        raise AdapterUnavailable(f"all {len(self._loaded)} LoRA adapters that fit here are in use")

    @property
    def has_room(self) -> bool:
        """Whether one more can be loaded without dropping another."""
        return len(self._loaded) < self._capacity

    def next_number(self) -> int:
        """For an adapter that is about to be loaded; no number comes twice."""
        self._numbers += 1
        return self._numbers

    def loaded(self, adapter: Adapter, number: int) -> None:
        """It can be used."""
        self._refused.pop(adapter.digest, None)
        self._loaded[adapter.digest] = _Loaded(adapter, number)

    def dropped(self, number: int) -> None:
        """It is loaded no more."""
        self._loaded = {digest: loaded for digest, loaded in self._loaded.items() if loaded.number != number}

    def refused(self, digest: str, reason: str, now_s: float) -> None:
        """It could not be loaded."""
        self._refused[digest] = (reason, now_s + REFUSED_FOR_S)
        while len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    def unused(self, digest: str) -> int | None:
        """The number of a loaded adapter that no request uses; None of others."""
        return None if digest in self._users else self.number(digest)

    def load(self, now_s: float) -> AdapterLoad:
        """For the load report."""
        if not self._users and not self._loaded and not self._refused:
            return NO_ADAPTERS
        return AdapterLoad(
            tuple(self._users),
            tuple(digest for digest in self._loaded if digest not in self._users),
            tuple(digest for digest, (_, until_s) in self._refused.items() if now_s < until_s),
        )

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken` where the state contradicts itself."""
        assert len(self._loaded) <= self._capacity, "no more are loaded than there is room for"
        assert len(self._users) <= self._capacity, "no more are in use than there is room for"
        assert len(self._refused) <= MAX_REFUSED, "what is remembered of refusals is bounded"
        assert all(self._users.values()), "an adapter without requests is not in use"
        used = {(request_id, digest) for digest, users in self._users.items() for request_id in users}
        assert used == set(self._digests.items()), "both ways say the same"
        numbers = [loaded.number for loaded in self._loaded.values()]
        assert len(set(numbers)) == len(numbers), "each has a number of its own"
