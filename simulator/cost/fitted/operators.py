"""Measured kernel times of one model on one device, as a cost model needs them."""

from dataclasses import dataclass
from typing import Protocol

from simulator.cost.fitted.interpolation import Curve, Grid
from simulator.cost.roofline.matrices import touched_experts
from simulator.cost.spec.model import Experts

_ELEMENT_BYTES = 2.0


@dataclass(frozen=True, slots=True)
class AttentionTables:
    """Times of one layer's attention, in ms."""

    prefill: Grid
    """Over new tokens of a chunk, tokens before it."""
    decode: Grid
    """Over decoding requests, context of each."""
    mixed: Grid | None = None
    """Over new tokens, tokens before them, decoding requests, context of each; None: the sum of the two."""


@dataclass(frozen=True, slots=True)
class Links:
    """Bandwidths and latencies of the links between an instance's devices, over which collectives run."""

    devices: int
    """Number of devices that share a layer, or its experts."""
    latency_ms: float
    """Latency of one hop."""
    bytes_per_ms: float

    def all_reduce_ms(self, size_bytes: float) -> float:
        """On a ring: everything passes each link twice, but for a device's own share."""
        hops = 2 * (self.devices - 1)
        return hops * self.latency_ms + hops / self.devices * size_bytes / self.bytes_per_ms

    def gather_ms(self, size_bytes: float) -> float:
        """An all-gather or a reduce-scatter of `size_bytes` in all."""
        hops = self.devices - 1
        return hops * self.latency_ms + hops / self.devices * size_bytes / self.bytes_per_ms


class AllReduce(Protocol):
    """How long the devices of an instance take to sum what each has."""

    def all_reduce_ms(self, size_bytes: float) -> float:
        """Duration of an all-reduce of `size_bytes` on each device."""


@dataclass(frozen=True, slots=True)
class MeasuredAllReduce:
    """The `AllReduce` of a table of measured times."""

    time_ms: Curve
    """Over bytes."""

    def all_reduce_ms(self, size_bytes: float) -> float:
        return self.time_ms.at(size_bytes)


@dataclass(frozen=True, slots=True)
class ExpertTables:
    """Times of one layer's routed experts, in ms."""

    time_ms: Grid
    """Over tokens, distinct experts that get work."""
    experts: Experts
    hidden_size: int
    links: Links | None = None
    """To the devices among which experts are divided, each with requests of its own; None: all on one."""

    def layer_ms(self, tokens: int, tokens_elsewhere: int = 0) -> float:
        """With `tokens` of this device and, where experts are divided, the other devices' tokens in the same step."""
        gathered = tokens + tokens_elsewhere
        devices = self.links.devices if self.links else 1
        # Each device has an even share of the experts, of the distinct ones touched and of the pairs routed.
        local_ms = self.time_ms.at(gathered / devices, touched_experts(self.experts, gathered) / devices)
        if self.links is None:
            return local_ms
        return local_ms + 2 * self.links.gather_ms(_ELEMENT_BYTES * gathered * self.hidden_size)


@dataclass(frozen=True, slots=True)
class OperatorTables:
    """Measured times of all operators of a step."""

    layers: int
    hidden_size: int
    layer: Curve
    """Projections, norms and MLP of one layer over the tokens of a step, in ms."""
    step: Curve
    """What a step has once (embedding, last norm), over its tokens."""
    sequence: Curve
    """Output head and sampler, over the requests of a step."""
    attention: AttentionTables
    experts: ExpertTables | None = None
    tensor_links: AllReduce | None = None
    """All-reduces after attention and MLP of every layer; None: one device."""
