"""Sampling parameters on the wire, the same for frontends and workers: by name, so that each needs one line in
`SamplingParams` and one in the message."""

from collections.abc import Callable
from typing import Any, Final

from controlplane.model.request import SamplingParams
from controlplane.model.sampling import parameters
from penstock.v1 import request_pb2

_Read = Callable[[request_pb2.SamplingParams], Any]


def sampling_message(sampling: SamplingParams) -> request_pb2.SamplingParams:
    """The message; what is None is left out of it."""
    message = request_pb2.SamplingParams()
    for name in _NAMES:
        value = getattr(sampling, name)
        if isinstance(value, tuple):
            if value:
                _set_items(message, name, value)
        elif value is not None:
            setattr(message, name, value)
    return message


def sampling_params(message: request_pb2.SamplingParams) -> SamplingParams:
    """The value; nothing is checked here."""
    return SamplingParams(**{name: read(message) for name, read in _READS.items()})


def _set_items(message: request_pb2.SamplingParams, name: str, items: tuple[Any, ...]) -> None:
    if name in _MAPS:
        getattr(message, name).update(items)
    elif name in _LISTS:
        for token_ids in items:
            getattr(message, name).add(token_ids=token_ids)
    else:
        getattr(message, name).extend(items)


def _reader(name: str, default: Any) -> _Read:
    if name in _MAPS:
        return lambda message: tuple(sorted(getattr(message, name).items()))
    if name in _LISTS:
        return lambda message: tuple(tuple(each.token_ids) for each in getattr(message, name))
    if default == ():
        return lambda message: tuple(getattr(message, name))
    if default is None:
        return lambda message: getattr(message, name) if message.HasField(name) else None
    return lambda message: getattr(message, name)


_FIELDS: Final = request_pb2.SamplingParams.DESCRIPTOR.fields_by_name
_LISTS: Final = frozenset(
    name for name, each in _FIELDS.items() if each.message_type is request_pb2.TokenIds.DESCRIPTOR
)
"""Tuples of token ids there, messages here."""
_MAPS: Final = frozenset(name for name, each in _FIELDS.items() if each.message_type is not None) - _LISTS
"""Pairs there, a map here."""
_NAMES: Final = tuple(parameters(SamplingParams))
_READS: Final = {name: _reader(name, each.default) for name, each in parameters(SamplingParams).items()}
