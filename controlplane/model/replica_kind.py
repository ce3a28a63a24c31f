"""Kinds of replica that one model can have side by side: of which GPU, in which shape, at what price."""

from collections import Counter
from collections.abc import Iterable
from math import inf

import msgspec

from mesh.errors import ConfigurationError

MAX_REPLICAS = 1024
MAX_KINDS = 8
"""Of one model: the choice among them is exact, and quick for as many."""
_FIELDS = {
    "gpu": "gpu",
    "tp": "tp",
    "pp": "pp",
    "price-per-hour": "price_per_hour",
    "capacity": "capacity_per_s",
    "maximum": "maximum",
}


class ReplicaKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one replica of this kind is, sustains and costs. Two kinds of a model differ in GPU or shape."""

    price_per_hour: float
    """Of one GPU."""
    capacity_per_s: float
    """Requests per second that one replica sustains within the SLO."""
    gpu: str = ""
    """Kind of GPU, by the name that machines have it by (`penstock up --gpu-kind`); empty: any."""
    tp: int = 1
    pp: int = 1
    maximum: int = MAX_REPLICAS
    """Replicas that there are GPUs for."""

    @property
    def replica_price_per_hour(self) -> float:
        """Of all GPUs of one replica."""
        return self.price_per_hour * self.tp * self.pp

    @property
    def key(self) -> tuple[str, int, int]:
        """What tells it from the model's other kinds."""
        return self.gpu, self.tp, self.pp

    @property
    def option(self) -> str:
        """As `read` takes it."""
        said = msgspec.to_builtins(self)
        return ",".join(f"{name}={said[field]}" for name, field in _FIELDS.items() if field in said)

    @classmethod
    def read(cls, text: str) -> "ReplicaKind":
        """Of NAME=VALUE pairs with commas between. Raises `ConfigurationError`."""
        given: dict[str, str] = {}
        for pair in text.split(","):
            name, is_pair, value = pair.partition("=")
            if name not in _FIELDS or not is_pair or _FIELDS[name] in given:
                raise ConfigurationError(f"{pair!r} of the kind {text!r} is none of {'=, '.join(_FIELDS)}=, each once")
            given[_FIELDS[name]] = value
        try:
            return msgspec.convert(given, cls, strict=False).checked()
        except msgspec.ValidationError as error:
            raise ConfigurationError(
                f"the kind {text!r} cannot be used: {error}; it is written as "
                "gpu=H100,tp=2,price-per-hour=3.5,capacity=4.2,maximum=8"
            ) from None

    def checked(self) -> "ReplicaKind":
        """Itself. Raises `ConfigurationError` for what no replica is."""
        if not (0 < self.price_per_hour < inf and 0 < self.capacity_per_s < inf):
            raise ConfigurationError(f"the kind {in_words(*self.key)} needs a price and a capacity above 0")
        if self.tp < 1 or self.pp < 1 or not 1 <= self.maximum <= MAX_REPLICAS:
            raise ConfigurationError(
                f"the kind {in_words(*self.key)} needs tp and pp of at least 1, and a maximum of 1 to {MAX_REPLICAS}"
            )
        return self


class KindReplicas(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """So many replicas of one kind."""

    replicas: int
    gpu: str = ""
    tp: int = 1
    pp: int = 1

    @property
    def key(self) -> tuple[str, int, int]:
        """That of the kind."""
        return self.gpu, self.tp, self.pp

    def __str__(self) -> str:
        return f"{self.replicas} x {in_words(*self.key)}"


def in_words(gpu: str, tp: int, pp: int) -> str:
    """A kind, for messages."""
    return " ".join(each for each in (gpu, f"TP={tp}", f"PP={pp}" if pp > 1 else "") if each)


def shapes_on(gpu: str, kinds: Iterable[KindReplicas]) -> Counter[tuple[int, int]]:
    """Replicas by shape that a machine with this kind of GPU starts: those of its kind and of any."""
    shapes: Counter[tuple[int, int]] = Counter()
    for each in kinds:
        if each.gpu in ("", gpu):
            shapes[each.tp, each.pp] += each.replicas
    return shapes
