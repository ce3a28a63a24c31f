"""Keeps the pools of the policy in force in the state store, where the next scheduler that leads them takes them over.

The schedulers that stand by follow what the leader writes, so that a new leader places its first request by the pools
of the former one. A leader that was paused overwrites nothing of a later one's: each record bears the leader's epoch.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Final, Protocol

import msgspec

from controlplane.policies.interface import Policy, has_pools
from mesh.errors import StoreError
from mesh.leadership_state import Lead
from mesh.store.followed_prefix import FollowedPrefix
from mesh.store.interface import StateStore

log = logging.getLogger(__name__)

POOLS_PREFIX: Final = "/penstock/pools/"
TICK_S: Final = 0.25
"""Between two writes of pools that change; what has changed since is lost with a leader that is killed."""


class PoolsRecord(msgspec.Struct, frozen=True):
    """What stands at a model's key, as JSON."""

    model: str
    policy: str
    pools: dict[str, str]
    """By instance."""
    epoch: int = 0
    """Of the leader that wrote it."""
    leader: str = ""
    """Its member id."""


class PoolsOwner(Protocol):
    """Where the policy in force is."""

    @property
    def configured(self) -> Policy:
        """The policy that places in the leader."""

    def model_pools(self) -> Mapping[str, Mapping[str, str]]:
        """Of the configured policy, by model and instance; empty if it keeps none."""

    def resume_pools(self, model: str, pools: Mapping[str, str]) -> None:
        """Have the configured policy, which keeps pools, go on with these."""


class PoolsKeeper:
    """Writes as the leader, and `resume`s as one that has just become it."""

    def __init__(self, store: StateStore, owner: PoolsOwner, lead: Lead, member_id: str) -> None:
        self._store = store
        self._owner = owner
        self._lead = lead
        self._member_id = member_id
        self._records = FollowedPrefix(store, POOLS_PREFIX, PoolsRecord, lambda key, record: None)
        self._kept: tuple[Policy, int] | None = None
        """The policy that has its pools, and in which epoch it got them."""

    async def follow(self) -> None:
        """Keep the store at the pools while this scheduler leads them, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._records.follow())
            tasks.create_task(self._keep())

    def resume(self) -> None:
        """Call when this scheduler begins to lead, before it places anything: a policy that has not been given the
        pools yet goes on with those of the store, unless its own are the latest."""
        policy = self._owner.configured
        kept = policy, self._lead.epoch
        if not self._lead.is_leading or not has_pools(policy) or not self._records.is_heard or self._kept == kept:
            return
        knows = self._kept is not None and self._kept[0] is policy
        self._kept = kept
        for record in self._records.records.values():
            if record.policy == policy.name and not (knows and record.leader == self._member_id):
                self._owner.resume_pools(record.model, record.pools)
                log.warning(
                    "going on with the pools of the former leader",
                    extra={"model": record.model, "leader": record.leader, "instances": len(record.pools)},
                )

    async def write(self) -> None:
        """As the leader, write what has changed. Raises `StoreError`."""
        self.resume()
        if not self._lead.is_leading or not self._records.is_heard:
            return
        policy = self._owner.configured
        if not has_pools(policy):
            self._kept = None
            for key in list(self._records.records):
                await self._store.delete(key)
            return
        for model, pools in self._owner.model_pools().items():
            known = self._records.records.get(POOLS_PREFIX + model)
            if pools and (known is None or known.policy != policy.name or known.pools != pools):
                await self._put(PoolsRecord(model, policy.name, dict(pools), self._lead.epoch, self._member_id))

    async def _put(self, record: PoolsRecord) -> None:
        """Over what was written in this epoch or before, and by nobody else meanwhile."""
        key = POOLS_PREFIX + record.model
        entry = await self._store.get(key)
        if self._lead.is_leading and (entry is None or _epoch_of(entry.value) <= record.epoch):
            revision = 0 if entry is None else entry.mod_revision
            await self._store.compare_and_swap(key, revision, msgspec.json.encode(record))

    async def _keep(self) -> None:
        while True:
            try:
                await self.write()
            except StoreError as error:
                log.warning("the pools cannot be kept for the next leader now", extra={"error": str(error)})
            await asyncio.sleep(TICK_S)


def _epoch_of(value: bytes) -> int:
    try:
        return msgspec.json.decode(value, type=PoolsRecord).epoch
    except msgspec.MsgspecError:
        return 0
