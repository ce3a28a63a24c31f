"""What must always hold of an object, as a `validate` method that tests and simulations call between its steps."""

from collections.abc import Callable
from functools import wraps
from reprlib import Repr
from typing import Any, Final, TypeVar

from mesh.errors import InvariantBroken

T = TypeVar("T")

_SHORT: Final = Repr()
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = _SHORT.maxdeque = 12
_SHORT.maxother = _SHORT.maxstring = 400


def invariants(check: Callable[[T], None]) -> Callable[[T], None]:
    """Makes a `validate` method of plain asserts: where one fails it raises `InvariantBroken`, with all fields of the
    object.

    Mutation testing leaves decorated functions alone, and these are part of the tests: a check that is made weaker
    fails in no state that the code can reach.
    """

    @wraps(check)
    def validate(self: T) -> None:
        try:
            check(self)
        except AssertionError as error:
            raise InvariantBroken(f"{type(self).__name__}: {error}; {_fields_of(self)}") from error

    return validate


def _fields_of(subject: object) -> str:
    names = dict.fromkeys(slot for kind in type(subject).__mro__ for slot in _slots_of(kind))
    names.update(dict.fromkeys(getattr(subject, "__dict__", ())))
    found: dict[str, Any] = {name: getattr(subject, name) for name in names if hasattr(subject, name)}
    return ", ".join(f"{name.lstrip('_')}={_SHORT.repr(value)}" for name, value in sorted(found.items()))


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
