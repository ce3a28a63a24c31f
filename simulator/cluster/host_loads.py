"""Brings the KV of prompts to their instances from the memory of the host.

It begins as soon as the instance has room for the whole prompt and it is the prompt's turn, as engines ask their
connectors; until it has come, the instance goes on with others. What would be computed sooner is computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from controlplane.policies.kv_options import LEAST_BROUGHT_TOKENS
from mesh.errors import RequestRefused
from simulator.cluster.config import ClusterConfig
from simulator.cluster.events import Event, EventQueue, Rank
from simulator.cluster.fleet import SimulatedFleet
from simulator.cluster.host_memory import HostMemory
from simulator.instance.counted_request import CountedRequest


@dataclass(slots=True, eq=False)
class _Load:
    """A prompt whose KV is on its way."""

    request_id: str
    target_id: str
    arrival: Event


class HostLoads:
    """All loads of a simulation."""

    def __init__(self, config: ClusterConfig, events: EventQueue, fleet: SimulatedFleet) -> None:
        self.loads = 0
        self.loaded_tokens = 0
        self._reuse = config.kv_reuse
        self._block_tokens = config.instance.block_tokens
        self._events = events
        self._fleet = fleet
        self._loads: dict[str, _Load] = {}
        """By request."""
        self._busy_until_ms: dict[str, float] = {}
        """By instance: its way to its host's memory carries one load at a time."""

    def fetcher_of(self, instance_id: str) -> "InstanceLoads | None":
        """For the scheduler of an instance; None where hosts keep no KV."""
        memory = self._fleet.host_memory(instance_id)
        return None if memory is None else InstanceLoads(self, instance_id, memory)

    def lost(self, instance_id: str) -> None:
        """An instance has died: nothing is brought there any more."""
        for load in [each for each in self._loads.values() if each.target_id == instance_id]:
            load.arrival.cancel()
            del self._loads[load.request_id]

    def begin(self, target_id: str, request_id: str, blocks: int, cached_blocks: int) -> bool:
        """Whether a request's blocks are worth a load, which has begun then."""
        tokens, now_ms = (blocks - cached_blocks) * self._block_tokens, self._events.now_ms
        if tokens < LEAST_BROUGHT_TOKENS:
            return False
        ends_ms = self._ends_ms(target_id, tokens)
        if ends_ms - now_ms > self._fleet.prefill_ms(target_id, tokens):
            return False
        self._begin(request_id, target_id, tokens, ends_ms, lambda _: self._arrive(request_id, blocks))
        return True

    def bring(self, instance_id: str, prefix: CountedRequest, most_blocks: int, then: Callable[[], None]) -> bool:
        """Whether leading blocks of a prompt are being loaded into an instance's prefix cache, for a peer; `then` is
        called once they are there. At most half of its free memory is taken for that."""
        memory, worker = self._fleet.host_memory(instance_id), self._fleet.workers[instance_id]
        if memory is None:
            return False
        instance, carrier = worker.instance, replace(prefix, request_id=f"{prefix.request_id}/host")
        cached, free = instance.cached_blocks(prefix), instance.config.kv_blocks - instance.load().kv_blocks_used
        blocks = min(memory.leading(prefix.block_hashes[:most_blocks]), cached + free // 2)
        tokens = (blocks - cached) * self._block_tokens
        if tokens < LEAST_BROUGHT_TOKENS:
            return False
        worker.touch(self._events.now_ms)
        try:
            instance.admit_carrier(carrier, blocks)
        except RequestRefused:
            return False
        finally:
            worker.wake(self._events.now_ms)
        memory.use(prefix.block_hashes[:blocks])

        def arrive(_: float) -> None:
            del self._loads[carrier.request_id]
            worker.touch(self._events.now_ms)
            instance.store_carried(carrier.request_id)
            worker.wake(self._events.now_ms)
            then()

        ends_ms = self._ends_ms(instance_id, tokens)
        self._begin(carrier.request_id, instance_id, tokens, ends_ms, arrive)
        return True

    def _ends_ms(self, instance_id: str, tokens: int) -> float:
        """When a load that begins now would be over: behind those that are on their way."""
        takes_ms = self._reuse.load_latency_ms + tokens * self._reuse.load_token_ms(
            self._fleet.spec(instance_id).config
        )
        return max(self._events.now_ms, self._busy_until_ms.get(instance_id, 0.0)) + takes_ms

    def _begin(
        self, request_id: str, instance_id: str, tokens: int, ends_ms: float, arrive: Callable[[float], None]
    ) -> None:
        self._busy_until_ms[instance_id] = ends_ms
        self._loads[request_id] = _Load(request_id, instance_id, self._events.at(ends_ms, Rank.MESSAGE, arrive))
        self.loads += 1
        self.loaded_tokens += tokens

    def _arrive(self, request_id: str, blocks: int) -> None:
        target, now_ms = self._fleet.workers[self._loads.pop(request_id).target_id], self._events.now_ms
        target.touch(now_ms)
        target.instance.fetched(request_id, blocks)
        target.wake(now_ms)


class InstanceLoads:
    """The `Fetcher` of one instance."""

    def __init__(self, loads: HostLoads, instance_id: str, memory: HostMemory) -> None:
        self._loads = loads
        self._instance_id = instance_id
        self._memory = memory

    def promised(self, request_id: str, block_hashes: Sequence[int]) -> int:
        return self._memory.leading(block_hashes)

    def fetch(self, request_id: str, block_hashes: Sequence[int], cached_blocks: int) -> int:
        self._memory.use(block_hashes)
        blocks = self._memory.leading(block_hashes)
        return blocks if self._loads.begin(self._instance_id, request_id, blocks, cached_blocks) else 0
