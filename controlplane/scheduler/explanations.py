"""Why recent requests went where they went. No I/O."""

from collections.abc import Mapping
from itertools import islice
from math import isfinite
from types import MappingProxyType

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.model.instance import InstanceDescription
from controlplane.model.placement import DecodeChoice, DeferredIndicators, Placement, PrefixPull

RECORD_BYTES = 1000
"""A record without its arrays, roughly."""


NO_POOLS: Mapping[str, str] = MappingProxyType({})
OPEN = "to be chosen at the end of the prefill"


class DecodeExplanation(msgspec.Struct, frozen=True, eq=False):
    """Where a request is decoded, and why."""

    instance_id: str
    rule: str = ""
    """Or why there was nothing to choose; empty in a fleet in which every instance does both."""
    instances: tuple[InstanceDescription, ...] = ()
    """What the entries of `scores` mean."""
    scores: NDArray[np.float64] | None = None

    @classmethod
    def of(cls, choice: DecodeChoice, instances: tuple[InstanceDescription, ...]) -> "DecodeExplanation":
        """`instances` are what the rows mean."""
        return cls(instances[choice.row].instance_id, choice.rule, instances, choice.scores)

    def score_of(self) -> dict[str, float]:
        """By instance, of those that were in question; lower wins."""
        if self.scores is None:
            return {}
        named = zip(self.instances, self.scores.tolist(), strict=True)
        return {instance.instance_id: score for instance, score in named if isfinite(score)}


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
    decode: "DecodeExplanation"
    pools: tuple[str, ...]
    """One for each of `instances`; empty if the policy keeps none."""
    cached_tokens: int = 0
    loaded_tokens: int = 0
    """See `Placement`."""
    pull: PrefixPull | None = None
    """None: no prefix is pulled."""
    vllm_parts: str = ""
    """See `PlacementRequest`."""

    @property
    def size_bytes(self) -> int:
        """Memory that the record holds, roughly."""
        kept = self.scores.nbytes * (2 + bool(self.pools))
        if isinstance(self.indicators, DeferredIndicators):
            return RECORD_BYTES + kept + self.indicators.nbytes
        return RECORD_BYTES + kept + sum(each.nbytes for each in self.indicators.values())


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

    def latest(self, limit: int) -> list[tuple[str, Explanation]]:
        """The last placements with their request ids, latest first."""
        return list(islice(reversed(self._records.items()), limit))

    def add(self, placement: Placement, placed_unix_ms: int, pools: Mapping[str, str] = NO_POOLS) -> None:
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
            _kept(decision.indicators),
            placement.excluded,
            _decode_of(placement),
            tuple(pools.get(each.instance_id, "") for each in placement.instances) if pools else (),
            placement.cached_tokens,
            placement.loaded_tokens,
            pull=placement.pull,
            vllm_parts=placement.request.vllm_parts,
        )
        self._forget(placement.request.request_id)
        self._records[placement.request.request_id] = record
        self._bytes += record.size_bytes
        while len(self._records) > self._max_records or (self._bytes > self._max_bytes and len(self._records) > 1):
            self._forget(next(iter(self._records)))

    def decode_chosen(self, request_id: str, instances: tuple[InstanceDescription, ...], choice: DecodeChoice) -> None:
        """What was open is chosen now."""
        record = self._records.get(request_id)
        if record is not None:
            decode = DecodeExplanation.of(choice, instances)
            self._records[request_id] = msgspec.structs.replace(record, decode=decode)

    def _forget(self, request_id: str) -> None:
        record = self._records.pop(request_id, None)
        if record is not None:
            self._bytes -= record.size_bytes


def _kept(indicators: Mapping[str, NDArray[np.int64]]) -> Mapping[str, NDArray[np.int64]]:
    """Copies, where an indicator may be a view that would keep a whole snapshot alive."""
    if isinstance(indicators, DeferredIndicators):
        return indicators
    return {name: values.copy() for name, values in indicators.items()}


def _decode_of(placement: Placement) -> DecodeExplanation:
    if placement.is_decode_open:
        return DecodeExplanation(placement.instance.instance_id, OPEN)
    if placement.decode is None:
        return DecodeExplanation(placement.instance.instance_id)
    return DecodeExplanation.of(placement.decode, placement.instances)
