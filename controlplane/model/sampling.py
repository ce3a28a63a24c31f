"""How a sampling parameter is declared: once, as a field of `controlplane.model.request.SamplingParams`.

Name, type and default of the field are vLLM's. `parameter` adds what a client may send for it. All else follows from
the declaration: the field of the request body with its check and its OpenAPI (`services.frontend.requests.sampling`),
the worker's check (`engine_worker.admission`), the message (`controlplane.sampling_message`), vLLM's argument
(`engine_worker.engines.vllm.sampling`) and what a simulated engine says that it does not honour
(`simulator.instance.script`).
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from math import inf, isfinite
from types import NoneType, UnionType
from typing import Any, Final, get_args, get_type_hints

INT32_MAX: Final = 2**31 - 1
_KEY: Final = "parameter"


@dataclass(frozen=True, slots=True)
class Bounds:
    """The numbers that a parameter may be; of a list, that each of its items may be."""

    low: float = -inf
    high: float = inf
    is_low_open: bool = False
    """`low` itself is not allowed."""

    def hold(self, value: float) -> bool:
        """Whether `value` is allowed. Infinity and NaN never are."""
        return isfinite(value) and self.low <= value <= self.high and not (self.is_low_open and value == self.low)

    def __str__(self) -> str:
        """As an error message says it, behind "must be"."""
        if self.low == -inf and self.high == inf:
            return "finite"
        if self.is_low_open:
            return f"above {self.low:g} and at most {self.high:g}"
        return f"from {self.low:g} to {self.high:g}"


TOKEN_IDS: Final = Bounds(0, INT32_MAX)
"""Declare a list of tokens with it: its items must be in the model's vocabulary besides."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A sampling parameter as it is declared."""

    name: str
    type: Any
    """Of the value in `SamplingParams`: int, float, bool, str, a tuple of one of them, or one of them and None.
    `logit_bias` and `bad_words`, which no body holds as they are, are tuples of tuples."""
    default: Any
    description: str
    bounds: Bounds
    min_items: int
    """Of a tuple that is given."""
    max_items: int
    is_in_body: bool
    """Both endpoints take it under its own name. False: the frontend works it out from the body by itself."""
    from_body: Callable[[Any], Any] | None
    """From what a client sent to the value; None: it is the value."""

    @property
    def type_but_none(self) -> Any:
        """`type` without the None of a parameter that may be left open: what `bounds` are of."""
        kinds = [kind for kind in get_args(self.type) if kind is not NoneType]
        return kinds[0] if isinstance(self.type, UnionType) else self.type

    def refusal(self, value: Any) -> str | None:
        """Why no worker takes this value, or None if it is right."""
        items = value if isinstance(value, tuple) else (value,)
        for item in items:
            if isinstance(item, int | float) and not self.bounds.hold(item):
                return f"{self.name} must be {self.bounds}, got {item}"
        return None


def parameter(
    default: Any = MISSING,
    description: str = "",
    bounds: Bounds = Bounds(),
    *,
    min_items: int = 0,
    max_items: int = 256,
    is_in_body: bool = True,
    from_body: Callable[[Any], Any] | None = None,
) -> Any:
    """A field of `SamplingParams`. `description` goes into the OpenAPI document."""
    declared = {
        "description": description,
        "bounds": bounds,
        "min_items": min_items,
        "max_items": max_items,
        "is_in_body": is_in_body,
        "from_body": from_body,
    }
    return field(default=default, metadata={_KEY: declared})


@cache
def parameters(params: type) -> Mapping[str, Parameter]:
    """The parameters that a dataclass of such fields declares, by name."""
    hints = get_type_hints(params)
    return {
        each.name: Parameter(each.name, hints[each.name], each.default, **each.metadata[_KEY])
        for each in fields(params)
    }
