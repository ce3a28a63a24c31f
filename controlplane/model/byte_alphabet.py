"""How byte-level vocabularies write bytes."""

from functools import cache


@cache
def bytes_of_characters() -> dict[str, int]:
    """The byte-level alphabet of GPT-2 (Radford et al. 2019), in which every byte has a printable stand-in: from that
    character to the byte; exactly 256 entries."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    mapping = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    mapping.update((chr(256 + index), byte) for index, byte in enumerate(others))
    return mapping
