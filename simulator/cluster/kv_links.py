"""KV transfers between instances: latency, shared bandwidth, and so many at once.

Every instance has one link, which its transfers share evenly; a transfer flows as fast as the slower of its two
shares. That is less than a real network's max-min fair shares where one of the two ends is not the bottleneck of its
other transfers: their unused share is not given away.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from mesh.errors import IllegalTransition
from simulator.cluster.config import KvLinkConfig
from simulator.cluster.events import Event, EventQueue, Rank


@dataclass(slots=True, eq=False)
class Transfer:
    """Blocks on their way."""

    source_id: str
    target_id: str
    left_bytes: float
    arrived: Callable[[float], None]
    failed: Callable[[float, str], None]
    flows: bool = False
    """Its latency has passed."""
    bytes_per_ms: float = 0.0
    counted_ms: float = 0.0
    """`left_bytes` is as of then."""
    event: Event | None = None
    """Its next one: the end of its latency, or its arrival."""

    @property
    def ends(self) -> tuple[str, str]:
        """Both instances."""
        return (self.source_id, self.target_id)


@dataclass(slots=True, eq=False)
class _Link:
    config: KvLinkConfig
    transfers: list[Transfer] = field(default_factory=list)

    @property
    def has_room(self) -> bool:
        return len(self.transfers) < self.config.max_parallel

    def share(self) -> float:
        return self.config.bytes_per_ms / sum(transfer.flows for transfer in self.transfers)


class KvLinks:
    """All links of a cluster. Transfers that find no room at one of their ends wait, first come, first served."""

    def __init__(self, events: EventQueue) -> None:
        self.moved_bytes = 0
        self._events = events
        self._links: dict[str, _Link] = {}
        self._waiting: list[Transfer] = []

    def join(self, instance_id: str, config: KvLinkConfig) -> None:
        """A new instance."""
        self._links[instance_id] = _Link(config)

    def leave(self, instance_id: str, now_ms: float) -> None:
        """An instance has died: what it sent or received has failed."""
        link = self._links.pop(instance_id)
        broken = [*link.transfers, *(each for each in self._waiting if instance_id in each.ends)]
        for transfer in broken:
            self.cancel(transfer)
        for transfer in broken:
            transfer.failed(now_ms, f"instance {instance_id} is gone")

    def transfer(
        self,
        source_id: str,
        target_id: str,
        size_bytes: int,
        arrived: Callable[[float], None],
        failed: Callable[[float, str], None],
    ) -> Transfer:
        """Move so many bytes; exactly one of `arrived` and `failed` is called, unless it is cancelled before."""
        if source_id not in self._links or target_id not in self._links:
            raise IllegalTransition(f"a transfer from {source_id} to {target_id}, one of which is not here")
        self.moved_bytes += size_bytes
        transfer = Transfer(source_id, target_id, float(size_bytes), arrived, failed)
        self._waiting.append(transfer)
        self._start_waiting()
        return transfer

    def cancel(self, transfer: Transfer) -> None:
        """Stop it, if it has not ended, and let others have its place."""
        if transfer in self._waiting:
            self._waiting.remove(transfer)
        else:
            self._leave_links(transfer)
        self._start_waiting()

    def waiting_transfers(self) -> int:
        """Transfers that have not begun."""
        return len(self._waiting)

    def _start_waiting(self) -> None:
        for transfer in list(self._waiting):
            links = [self._links.get(end) for end in transfer.ends]
            if all(link is not None and link.has_room for link in links):
                self._waiting.remove(transfer)
                self._start(transfer)

    def _start(self, transfer: Transfer) -> None:
        links = [self._links[end] for end in transfer.ends]
        for link in links:
            link.transfers.append(transfer)
        latency_ms = max(link.config.latency_ms for link in links)

        def flow(now_ms: float) -> None:
            transfer.flows, transfer.counted_ms = True, now_ms
            self._share_anew(transfer)

        transfer.event = self._events.at(self._events.now_ms + latency_ms, Rank.MESSAGE, flow)

    def _arrive(self, transfer: Transfer, now_ms: float) -> None:
        self._leave_links(transfer)
        self._start_waiting()
        transfer.arrived(now_ms)

    def _leave_links(self, transfer: Transfer) -> None:
        if transfer.event is None:
            return
        transfer.event.cancel()
        transfer.event = None
        for end in transfer.ends:
            link = self._links.get(end)
            if link is not None:
                link.transfers.remove(transfer)
        self._share_anew(transfer)

    def _share_anew(self, changed: Transfer) -> None:
        """One more, or one less, shares the links at both ends of `changed`."""
        links = [self._links[end] for end in changed.ends if end in self._links]
        for transfer in dict.fromkeys(each for link in links for each in link.transfers if each.flows):
            self._set_rate(transfer)

    def _set_rate(self, transfer: Transfer) -> None:
        now_ms = self._events.now_ms
        ends = [self._links[end] for end in transfer.ends if end in self._links]
        if len(ends) < 2 or transfer.event is None:
            return  # one end has just died; the transfer is about to be told
        transfer.left_bytes -= (now_ms - transfer.counted_ms) * transfer.bytes_per_ms
        transfer.counted_ms = now_ms
        transfer.bytes_per_ms = min(link.share() for link in ends)
        transfer.event.cancel()
        left_ms = max(transfer.left_bytes, 0.0) / transfer.bytes_per_ms
        transfer.event = self._events.at(now_ms + left_ms, Rank.MESSAGE, lambda at_ms: self._arrive(transfer, at_ms))
