"""What fits into the state store: intent and membership, never bulk data."""

from mesh.errors import StoreError

MAX_KEY_BYTES = 1024
# etcd refuses requests above 1.5 MiB; the same bound everywhere keeps the stores interchangeable.
MAX_VALUE_BYTES = 1 << 20
# One listing may hold the whole store: it must fit into a message.
MAX_STORE_BYTES = 32 << 20


def key_bytes(key: str) -> bytes:
    """The key in UTF-8. Raises `StoreError` for a key that no store takes."""
    try:
        encoded = key.encode()
    except UnicodeEncodeError as error:
        raise StoreError(f"key {key!r} is not valid Unicode; use a plain path such as 'plans/current'") from error
    if not 0 < len(encoded) <= MAX_KEY_BYTES:
        raise StoreError(f"a key has 1 to {MAX_KEY_BYTES} bytes, this one {len(encoded)}: {key[:64]!r}")
    return encoded


def check_value(key: str, value: bytes) -> None:
    """Raises `StoreError` for a value that is too large."""
    if len(value) > MAX_VALUE_BYTES:
        raise StoreError(
            f"the value of {key!r} has {len(value)} bytes, at most {MAX_VALUE_BYTES} fit; store a reference instead"
        )
