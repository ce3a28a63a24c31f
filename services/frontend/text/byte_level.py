"""The byte-level alphabet of GPT-2 (Radford et al. 2019): every byte has a printable stand-in character."""

from functools import cache


@cache
def bytes_of_characters() -> dict[str, int]:
    """From the stand-in character to the byte it stands for; exactly 256 entries."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    mapping = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    mapping.update((chr(256 + index), byte) for index, byte in enumerate(others))
    return mapping


def token_bytes(token: str) -> bytes:
    """The bytes that a vocabulary entry stands for; an added token, not spelled in the alphabet, is itself."""
    mapping = bytes_of_characters()
    try:
        return bytes([mapping[character] for character in token])
    except KeyError:
        return token.encode("utf-8")
