"""Why recent requests went where they went. No I/O."""

from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.model.instance import InstanceDescription
from controlplane.model.placement import DecodeChoice, Placement

RECORD_BYTES = 1000
"""A record without its arrays, roughly."""


class Explanation(msgspec.Struct, frozen=True, eq=False):
    """One placement's reasons; arrays have one entry for each of `instances`."""

    policy: str
    rule: str
    chosen_instance_id: str
    prompt_tokens: int
    placed_unix_ms: int
    instances: tuple[InstanceDescription, ...]
    scores: NDArray[np.float64]
    indicators: Mapping[str, NDArray[np.int64]]
    excluded: Mapping[str, str]
    decode: DecodeChoice | None

    @property
    def decode_instance_id(self) -> str:
        """Where the request is decoded."""
        return self.chosen_instance_id if self.decode is None else self.instances[self.decode.row].instance_id

    @property
    def size_bytes(self) -> int:
        """Memory that the record holds, roughly."""
        return RECORD_BYTES + self.scores.nbytes * (2 + len(self.indicators))


class Explanations:
    """The last placements by request id, bounded in number and in memory."""

    def __init__(self, max_records: int, max_bytes: int) -> None:
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._records: dict[str, Explanation] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def get(self, request_id: str) -> Explanation | None:
        """The request's last placement; None if it is not (or no longer) known."""
        return self._records.get(request_id)

    def add(self, placement: Placement, placed_unix_ms: int) -> None:
        """Remember a placement, and forget the oldest ones where there are too many."""
        decision = placement.decision
        record = Explanation(
            placement.policy,
            placement.rule,
            placement.instance.instance_id,
            placement.request.prompt_tokens,
            placed_unix_ms,
            placement.instances,
            decision.scores,
            # Copies: an indicator may be a view that would keep a whole snapshot alive.
            {name: values.copy() for name, values in decision.indicators.items()},
            placement.excluded,
            placement.decode,
        )
        self._forget(placement.request.request_id)
        self._records[placement.request.request_id] = record
        self._bytes += record.size_bytes
        while len(self._records) > self._max_records or (self._bytes > self._max_bytes and len(self._records) > 1):
            self._forget(next(iter(self._records)))

    def _forget(self, request_id: str) -> None:
        record = self._records.pop(request_id, None)
        if record is not None:
            self._bytes -= record.size_bytes
