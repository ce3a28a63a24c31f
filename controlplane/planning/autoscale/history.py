"""What an autoscaler remembers of a model, as bytes for the state store: a planner that is restarted goes on from it.

    penstock autoscale history 1 <crc32 of the rest, 8 hex digits>\\n<deflated msgpack>

Rates are kept as half-precision floats: 0.05 % is far below any forecast's error, and two weeks of minutes take 80 KB.
"""

import struct
import zlib
from collections.abc import Sequence
from itertools import pairwise
from math import isfinite
from typing import Final

import msgspec

from controlplane.planning.autoscale.forecast import KEPT_BUCKETS
from mesh.errors import ConfigurationError

HISTORIES_PREFIX: Final = "/penstock/autoscale/history/"
"""Followed by the model's name; the leading planner writes these."""
HISTORIES_BYTES: Final = 8 << 20
"""Of all models together, a quarter of what the state store holds: with more than a hundred models each keeps less than
two weeks."""
RATE_BYTES: Final = 2
HIGHEST_PER_S: Final = 65_504.0
"""The highest rate that half precision holds."""
VERSION: Final = 1
_MAGIC: Final = b"penstock autoscale history"
_MAX_BYTES: Final = 1 << 20


class AutoscaleHistory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one model. Ages are seconds before the moment at which it was written."""

    model: str
    interval_s: float
    """Of the policy: each rate is the mean of so long."""
    rates: bytes
    """Requests per second, oldest first; see `packed_rates`."""
    margin: float
    kept_per_s: float
    broken_per_s: float
    """Of `SeenCapacity`."""
    idle_s: float
    """Since the last request."""
    needs: tuple[tuple[float, int | float], ...] = ()
    """(age, replicas) that were needed, falling: for the time until one may go. Requests/s instead of replicas where
    the policy names kinds."""
    cold_start_s: float | None = None
    """As measured."""
    written_unix_s: float = 0.0
    epoch: int = 0
    """Of the leader that has written it."""

    @property
    def rates_per_s(self) -> tuple[float, ...]:
        """Of the remembered intervals, oldest first."""
        return tuple(value for (value,) in struct.iter_unpack("<e", self.rates))

    def checked(self) -> "AutoscaleHistory":
        """Itself. Raises `ConfigurationError` for what no autoscaler has written."""
        numbers = (self.margin, self.kept_per_s, self.idle_s, self.cold_start_s or 0.0, self.written_unix_s)
        ages = [age_s for age_s, _ in self.needs]
        counts = [count for _, count in self.needs]
        holds = (
            bool(self.model)
            and 0 < self.interval_s < float("inf")
            and self.margin > 0
            and all(isfinite(number) and number >= 0 for number in (*numbers, *ages))
            and self.kept_per_s < self.broken_per_s
            and len(self.rates) % RATE_BYTES == 0
            and len(self.rates) <= RATE_BYTES * KEPT_BUCKETS
            and all(0 <= rate < float("inf") for rate in self.rates_per_s)
            and all(0 <= count <= HIGHEST_PER_S for count in counts)
            and all(older >= newer for older, newer in pairwise(ages))
            and all(more > fewer for more, fewer in pairwise(counts))
        )
        if not holds:
            raise ConfigurationError(f"the history of {self.model or 'a model'} says what no autoscaler observes")
        return self


def packed_rates(rates_per_s: Sequence[float]) -> bytes:
    """Two bytes each, little-endian."""
    return struct.pack(f"<{len(rates_per_s)}e", *(min(rate, HIGHEST_PER_S) for rate in rates_per_s))


def encode_history(history: AutoscaleHistory) -> bytes:
    """For the state store."""
    body = zlib.compress(msgspec.msgpack.encode(history))
    return _MAGIC + b" %d %08x\n" % (VERSION, zlib.crc32(body)) + body


def decode_history(value: bytes) -> AutoscaleHistory:
    """Of what the state store holds. Raises `ConfigurationError` for another version, and for what is damaged."""
    head, separator, body = value.partition(b"\n")
    words = head.removeprefix(_MAGIC).split()
    if not separator or not head.startswith(_MAGIC) or len(words) != 2:
        raise ConfigurationError("an autoscale history does not begin as one; it is made anew")
    if words[0] != b"%d" % VERSION:
        raise ConfigurationError(
            f"an autoscale history has version {words[0].decode(errors='replace')}, this release reads {VERSION}; "
            "it is made anew"
        )
    if words[1] != b"%08x" % zlib.crc32(body):
        raise ConfigurationError("an autoscale history is damaged: its checksum differs; it is made anew")
    unpacker = zlib.decompressobj()
    try:
        plain = unpacker.decompress(body, _MAX_BYTES)
        if not unpacker.eof:
            raise ConfigurationError(f"an autoscale history is cut off, or has more than {_MAX_BYTES} bytes")
        return msgspec.msgpack.decode(plain, type=AutoscaleHistory).checked()
    except (zlib.error, msgspec.MsgspecError) as error:
        raise ConfigurationError(f"an autoscale history cannot be read: {error}; it is made anew") from error
