"""What differs between two answers, place by place."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.conformance.answers import Answer, Json

ABSENT = "absent"
VOLATILE = frozenset(
    (
        *("id", "created", "created_at", "completed_at", "item_id", "call_id", "response_id", "system_fingerprint"),
        *("sequence_number", "cached_tokens", "cached_tokens_per_turn", "cache_read_input_tokens"),
        *("cache_creation_input_tokens", "cache_write_tokens", "created_cache_tokens", "message", "server_load"),
        "signature",
    )
)
"""Names of what differs from run to run, or is for people to read: only the type is compared."""
FLOAT_TOLERANCE = 2e-3
_INDEX = re.compile(r"\[\d+\]")


@dataclass(frozen=True)
class Difference:
    """At a place of the answer (`body.choices[0].text`), what a stock server has there and what the mesh has."""

    place: str
    stock: str
    mesh: str

    @property
    def kind(self) -> str:
        """The place without positions: `body.choices[].text`."""
        return _INDEX.sub("[]", self.place)

    def __str__(self) -> str:
        return f"{self.place}: {self.stock} | {self.mesh}"


def differences(stock: Answer, mesh: Answer) -> list[Difference]:
    """All of them; none where the two mean the same to a client."""
    if stock.status != mesh.status:
        return [Difference("status", _shown(stock, stock.status), _shown(mesh, mesh.status))]
    return list(_differences("", stock.as_json(), mesh.as_json()))


def _differences(place: str, stock: Json, mesh: Json) -> Iterator[Difference]:
    name = place.rpartition(".")[2]
    if isinstance(stock, dict) and isinstance(mesh, dict):
        for key in {**stock, **mesh}:
            below = f"{place}.{key}" if place else key
            if key not in stock or key not in mesh:
                yield Difference(below, _text(stock.get(key, ABSENT)), _text(mesh.get(key, ABSENT)))
            else:
                yield from _differences(below, stock[key], mesh[key])
    elif isinstance(stock, list) and isinstance(mesh, list):
        if len(stock) != len(mesh):
            yield Difference(f"{place}.length", str(len(stock)), str(len(mesh)))
        for index, (one, other) in enumerate(zip(stock, mesh, strict=False)):
            yield from _differences(f"{place}[{index}]", one, other)
    elif not _same(name, stock, mesh):
        yield Difference(place, _text(stock), _text(mesh))


def _same(name: str, stock: Json, mesh: Json) -> bool:
    if name in VOLATILE:
        return type(stock) is type(mesh)
    if isinstance(stock, float) and isinstance(mesh, int | float):
        return math.isclose(stock, mesh, rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE)
    return bool(stock == mesh) and type(stock) is type(mesh)


def _shown(answer: Answer, status: int) -> str:
    error = answer.body.get("error") if isinstance(answer.body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return str(status) if message is None else f"{status} ({_text(message)})"


def _text(value: Json, longest: int = 120) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= longest else text[: longest - 1] + "…"
