"""The four elastic pools and how an instance goes from one to another (Arrow, section 5.2 and figure 5)."""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from types import MappingProxyType

from mesh.errors import IllegalTransition
from mesh.invariants import invariants


class Pool(StrEnum):
    """What an instance is for. New requests of the named kind go there; it may still finish the other kind."""

    PREFILL = "prefill"
    DECODE = "decode"
    PREFILL_TO_DECODE = "prefill_to_decode"
    """For decoding by now, with prefill work left."""
    DECODE_TO_PREFILL = "decode_to_prefill"
    """For prefill by now, with decode work left."""

    @property
    def prefills(self) -> bool:
        """Whether new prompts go there."""
        return self in (Pool.PREFILL, Pool.DECODE_TO_PREFILL)

    @property
    def decodes(self) -> bool:
        """Whether new decodes go there."""
        return not self.prefills


class PoolEvent(StrEnum):
    """What moves an instance between pools. What work it has left decides between two of the targets."""

    TO_PREFILL = "to_prefill"
    """The scheduler reassigns it to prefill; nothing left to decode."""
    TO_PREFILL_BUSY = "to_prefill_busy"
    """The scheduler reassigns it to prefill; requests are left to decode."""
    TO_DECODE = "to_decode"
    """The scheduler reassigns it to decode; nothing left to prefill."""
    TO_DECODE_BUSY = "to_decode_busy"
    """The scheduler reassigns it to decode; prompts are left to compute."""
    PREFILL_DONE = "prefill_done"
    DECODE_DONE = "decode_done"


TRANSITIONS: Mapping[tuple[Pool, PoolEvent], Pool] = MappingProxyType(
    {
        (Pool.PREFILL, PoolEvent.TO_DECODE): Pool.DECODE,
        (Pool.PREFILL, PoolEvent.TO_DECODE_BUSY): Pool.PREFILL_TO_DECODE,
        (Pool.DECODE, PoolEvent.TO_PREFILL): Pool.PREFILL,
        (Pool.DECODE, PoolEvent.TO_PREFILL_BUSY): Pool.DECODE_TO_PREFILL,
        (Pool.PREFILL_TO_DECODE, PoolEvent.PREFILL_DONE): Pool.DECODE,
        (Pool.PREFILL_TO_DECODE, PoolEvent.TO_PREFILL): Pool.PREFILL,
        (Pool.PREFILL_TO_DECODE, PoolEvent.TO_PREFILL_BUSY): Pool.DECODE_TO_PREFILL,
        (Pool.DECODE_TO_PREFILL, PoolEvent.DECODE_DONE): Pool.PREFILL,
        (Pool.DECODE_TO_PREFILL, PoolEvent.TO_DECODE): Pool.DECODE,
        (Pool.DECODE_TO_PREFILL, PoolEvent.TO_DECODE_BUSY): Pool.PREFILL_TO_DECODE,
    }
)


class ElasticPools:
    """Which pool each instance is in.

    A move that would take away the last instance for prefill, or the last one for decoding, is refused. Only one that
    leaves the cluster can be the last: its owner then reassigns another one.
    """

    def __init__(self) -> None:
        self._pools: dict[str, Pool] = {}
        self._pinned: set[str] = set()

    def __len__(self) -> int:
        return len(self._pools)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pools)

    def __contains__(self, instance_id: str) -> bool:
        return instance_id in self._pools

    def __getitem__(self, instance_id: str) -> Pool:
        return self._pools[instance_id]

    @property
    def prefilling(self) -> int:
        """Instances that new prompts may go to."""
        return sum(pool.prefills for pool in self._pools.values())

    @property
    def decoding(self) -> int:
        """Instances that new decodes may go to."""
        return len(self._pools) - self.prefilling

    def is_elastic(self, instance_id: str) -> bool:
        """Whether it may change pools."""
        return instance_id not in self._pinned

    def join(self, instance_id: str, only: Pool | None = None, former: Pool | None = None) -> None:
        """A new instance goes to whichever kind has fewer, prefill first: half and half at the start.

        `only` is for one that its operator has set aside for one kind: it is in that pool and never leaves it.
        `former` is the pool in which another scheduler had it: it stays there.
        """
        if instance_id in self._pools:
            raise IllegalTransition(f"instance {instance_id} joins, but it is in the pool {self._pools[instance_id]}")
        if only is not None:
            self._pinned.add(instance_id)
        fewer = Pool.PREFILL if self.prefilling <= self.decoding else Pool.DECODE
        self._pools[instance_id] = only or former or fewer

    def leave(self, instance_id: str) -> None:
        """Forget an instance. Raises `IllegalTransition` if it is in no pool."""
        if instance_id not in self._pools:
            raise IllegalTransition(f"instance {instance_id} leaves, but it is in no pool")
        del self._pools[instance_id]
        self._pinned.discard(instance_id)

    def can_give_to_prefill(self) -> bool:
        """Whether a decoding instance would be left (line 2 of Algorithm 3)."""
        return self.decoding > 1

    def can_give_to_decode(self) -> bool:
        """Whether a prefilling instance would be left (line 2 of Algorithm 4)."""
        return self.prefilling > 1

    def assign_prefill(self, instance_id: str, is_decoding: bool) -> Pool:
        """Reassign a decoding instance; `is_decoding`: it has requests left to decode."""
        if not self.can_give_to_prefill():
            raise IllegalTransition(f"instance {instance_id} is the last one that decodes; it must stay so")
        return self._move(instance_id, PoolEvent.TO_PREFILL_BUSY if is_decoding else PoolEvent.TO_PREFILL)

    def assign_decode(self, instance_id: str, is_prefilling: bool) -> Pool:
        """Reassign a prefilling instance; `is_prefilling`: it has prompts left to compute."""
        if not self.can_give_to_decode():
            raise IllegalTransition(f"instance {instance_id} is the last one that prefills; it must stay so")
        return self._move(instance_id, PoolEvent.TO_DECODE_BUSY if is_prefilling else PoolEvent.TO_DECODE)

    def settle(self, instance_id: str, is_prefilling: bool, is_decoding: bool) -> Pool:
        """Take an instance out of its transition once the old kind of work is done."""
        pool = self._pools[instance_id]
        if pool is Pool.PREFILL_TO_DECODE and not is_prefilling:
            return self._move(instance_id, PoolEvent.PREFILL_DONE)
        if pool is Pool.DECODE_TO_PREFILL and not is_decoding:
            return self._move(instance_id, PoolEvent.DECODE_DONE)
        return pool

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        assert self._pinned <= self._pools.keys(), "who is set aside is in a pool"
        between = (Pool.PREFILL_TO_DECODE, Pool.DECODE_TO_PREFILL)
        assert all(self._pools[each] not in between for each in self._pinned), "who is set aside never changes pools"

    def _move(self, instance_id: str, event: PoolEvent) -> Pool:
        pool = self._pools.get(instance_id)
        if pool is None:
            raise IllegalTransition(f"instance {instance_id}: {event}, but it is in no pool")
        if instance_id in self._pinned:
            raise IllegalTransition(f"instance {instance_id}: {event}, but it is set aside for the pool {pool}")
        if (pool, event) not in TRANSITIONS:
            raise IllegalTransition(f"instance {instance_id} is in the pool {pool}; there is no {event} from there")
        self._pools[instance_id] = TRANSITIONS[pool, event]
        return self._pools[instance_id]
