"""Protocol messages as plain JSON values.

protobuf's own mapping writes 64-bit integers as strings and enum values with their prefix; people and jq want numbers
and bare words.
"""

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message


def plain(message: Message) -> dict[str, Any]:
    """Every field by its proto name, defaults included; an unset sub-message or optional field is left out."""
    result: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        result[field.name] = _field(field, getattr(message, field.name))
    return result


def _field(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return {str(key): inner for key, inner in value.items()}
    if field.is_repeated:
        return [_single(field, inner) for inner in value]
    return _single(field, value)


def _single(field: FieldDescriptor, value: Any) -> Any:
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return plain(value)
    if field.type == FieldDescriptor.TYPE_ENUM:
        return _enum_word(field, value)
    return value


def _enum_word(field: FieldDescriptor, number: int) -> str:
    name = str(field.enum_type.values_by_number[number].name)
    prefix = "".join("_" + letter if letter.isupper() else letter.upper() for letter in field.enum_type.name)
    return name.removeprefix(prefix.lstrip("_") + "_").lower()
