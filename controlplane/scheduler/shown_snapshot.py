"""What the next decision would see, for people: made in slices, and once for all who look at about the same time.

A thousand instances take ten milliseconds. Made at once they would hold up the placements behind them, for each console
that is watched, once a second.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from controlplane.load_message import load_message
from controlplane.model.snapshot import Snapshot
from controlplane.scheduler.placement_service import PlacementService
from mesh.runtime import Clock
from penstock.v1 import scheduler_pb2

UNMONITORED: Final = "unmonitored"
"""State of an instance that is placed on by its last known load, for no monitor hears of it."""
SLICE: Final = 50
"""Instances between which placements have their turn: half a millisecond."""


class ShownSnapshot:
    """Makes answers to `GetSnapshot`, and keeps the last one."""

    def __init__(self, placements: PlacementService, peers: Callable[[], Sequence[str]], clock: Clock) -> None:
        """`peers` says which schedulers are told of this one's placements."""
        self._placements = placements
        self._peers = peers
        self._clock = clock
        self._lock = asyncio.Lock()
        self._made = scheduler_pb2.GetSnapshotResponse()
        self._made_s = float("-inf")

    async def get(self, max_age_ms: int) -> scheduler_pb2.GetSnapshotResponse:
        """One that was made at most so long ago; 0: a new one. Who comes or goes meanwhile may be in it or not."""
        async with self._lock:
            if max_age_ms == 0 or 1000 * (self._clock.now_s() - self._made_s) > max_age_ms:
                now_s = self._clock.now_s()
                self._made, self._made_s = await self._make(), now_s
            return self._made

    async def _make(self) -> scheduler_pb2.GetSnapshotResponse:
        feed, instances = self._placements.feed, list[scheduler_pb2.SnapshotInstance]()
        for model in feed.table.models():
            snapshot = feed.table.snapshot(model)
            if snapshot is None:
                continue  # its last instance has gone since
            for row in range(len(snapshot)):
                if (shown := self._instance(snapshot, row)) is not None:
                    instances.append(shown)
                if len(instances) % SLICE == SLICE - 1:
                    await asyncio.sleep(0)
        return scheduler_pb2.GetSnapshotResponse(
            instances=instances,
            policy=self._placements.switch.in_force.name,
            synced=feed.synced,
            age_ms=self._placements.heard_age_ms(),
            peers=self._peers(),
        )

    def _instance(self, snapshot: Snapshot, row: int) -> scheduler_pb2.SnapshotInstance | None:
        table, instance, state = self._placements.feed.table, snapshot.instances[row], snapshot.state(row)
        name = instance.instance_id
        try:
            load = load_message(table.load(name), state)
        except KeyError:
            return None  # it has gone since
        shown = "stale" if snapshot.stale[row] else str(state)
        return scheduler_pb2.SnapshotInstance(
            instance_id=name,
            model=instance.model,
            state=UNMONITORED if name in self._placements.feed.by_last_load else shown,
            load=load,
            unreported_requests=int(snapshot.unreported_requests[row]),
            cached_blocks=table.index.held_blocks(int(snapshot.slots[row])),
            host_blocks=table.host_blocks.held(name),
            disk_blocks=table.disk_blocks.held(name),
            address=instance.address,
            phase=instance.phase.value,
            unreported_decodes=int(snapshot.unreported_decodes[row]),
            pool=self._placements.pools.get(name, ""),
        )
