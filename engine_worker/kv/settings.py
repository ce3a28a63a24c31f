"""How an agent moves blocks, and its bounds."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from mesh.errors import ConfigurationError

Device: TypeAlias = Literal["cpu", "cuda"]

GATHERED_BYTES: Final[Mapping[Device, int]] = MappingProxyType({"cpu": 1024 * 1024, "cuda": 4 * 1024 * 1024})
"""The `gathered_bytes` to use by default. On a GPU a message costs some 0.4 ms of Python and CUDA's calls, however
large it is; no more than `message_bytes`, or peers of earlier releases would refuse it."""


@dataclass(frozen=True, slots=True)
class KvTransferSettings:
    """The measurements behind the sizes are in benchmarks/README.md."""

    host: str = "127.0.0.1"
    """Peers connect here; 0.0.0.0 or :: for every address of the machine."""
    port: int = 0
    """The agent listens here, and UCX's TCP transport on the one above; 0 takes free ones."""
    device: Device = "cpu"
    """Where the KV memory is; decides the transports."""
    parallel_transfers: int = 3
    """Pulled at once, and served at once (CascadeInfer, section 5)."""
    queued_transfers: int = 64
    """Wait for their turn on either side; one more is refused."""
    message_bytes: int = 4 * 1024 * 1024
    """Largest message."""
    direct_bytes: int = 128 * 1024
    """Consecutive bytes from here on travel as messages of their own, without a copy; less is gathered."""
    gathered_bytes: int = GATHERED_BYTES["cpu"]
    """Largest message of gathered pieces, and the size of a staging buffer; see `GATHERED_BYTES`."""
    window_messages: int = 8
    """Messages of one transfer under way at once; also the staging buffers of a transfer."""
    spin_us: float = 50.0
    """How long the agent looks for the next fragment before it sleeps. Without that, sender and receiver put each
    other to sleep at each fragment and shared memory runs at a tenth of its speed."""
    connect_s: float = 5.0
    grace_s: float = 0.25
    """How long an ended transfer may take to come to rest before its connection is cut."""
    beat_s: float = 0.25
    """While transfers are under way the two sides say so often that they live."""
    silent_beats: int = 8
    """A peer that was silent for so many beats is taken for lost: 2 s, which a busy machine does not need."""
    probe_s: float = 1.0
    """How often the agent looks whether it can still be reached; when it has lost a peer, or could not connect to one,
    it looks at once."""
    reopen_s: float = 5.0
    """How long transfers under way are given before an agent that new peers cannot reach is opened anew."""
    max_connections: int = 256
    """Connections with other agents, both directions together."""
    checksums: bool = False
    """Debug mode: xxh3 of every message, taken before it is sent and after it arrived."""

    def __post_init__(self) -> None:
        for name in (
            "parallel_transfers",
            "window_messages",
            "message_bytes",
            "direct_bytes",
            "silent_beats",
            "max_connections",
        ):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.direct_bytes <= self.gathered_bytes <= self.message_bytes:
            raise ConfigurationError(
                f"direct_bytes ({self.direct_bytes}), gathered_bytes ({self.gathered_bytes}) and message_bytes "
                f"({self.message_bytes}) must be given in ascending order"
            )
        if self.queued_transfers < 0 or self.spin_us < 0:
            raise ConfigurationError("queued_transfers and spin_us must not be negative")
        if min(self.connect_s, self.grace_s, self.beat_s) <= 0:
            raise ConfigurationError("connect_s, grace_s and beat_s must be more than 0")
