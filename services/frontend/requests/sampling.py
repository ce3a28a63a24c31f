"""Sampling parameters in a request body, as `controlplane.model.request.SamplingParams` declares them."""

from math import inf
from typing import Annotated, Any, Final, get_args, get_origin

import msgspec
from msgspec import Meta

from controlplane.model.request import SamplingParams
from controlplane.model.sampling import Bounds, Parameter, parameters

_IN_BODY: Final = tuple(each for each in parameters(SamplingParams).values() if each.is_in_body)


def body_field(declared: Parameter) -> tuple[str, Any, None]:
    """The parameter in a body, as `msgspec.defstruct` takes it: name, type (or null, bounds and description included),
    and null as the default."""
    kind = declared.type_but_none
    if get_origin(kind) is tuple:
        item: Any = Annotated[get_args(kind)[0], _meta(declared.bounds)]
        value: Any = Annotated[list[item], Meta(min_length=declared.min_items, max_length=declared.max_items)]
    elif kind in (int, float):
        value = Annotated[kind, _meta(declared.bounds)]
    else:
        value = kind
    return declared.name, Annotated[value | None, Meta(description=declared.description)], None


def body_fields() -> list[tuple[str, Any, None]]:
    """All that both endpoints take under their own names."""
    return [body_field(declared) for declared in _IN_BODY]


def values_in(body: msgspec.Struct, declared: tuple[Parameter, ...] = _IN_BODY) -> dict[str, Any]:
    """What a body says of them, as arguments of `SamplingParams`; what is left out or null keeps its default."""
    values: dict[str, Any] = {}
    for each in declared:
        value = getattr(body, each.name)
        if value is None:
            continue
        if isinstance(value, list):
            value = tuple(value)
        values[each.name] = value if each.from_body is None else each.from_body(value)
    return values


def _meta(bounds: Bounds) -> Meta:
    low = None if bounds.low == -inf else bounds.low
    high = None if bounds.high == inf else bounds.high
    return Meta(gt=low, le=high) if bounds.is_low_open else Meta(ge=low, le=high)
