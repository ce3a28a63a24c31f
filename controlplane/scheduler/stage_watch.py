"""Keeps the placement policy at the stages that stand in the state store, if it is one that places by stages."""

import asyncio
import logging

from controlplane.policies.stages.layout import StageLayout
from controlplane.policies.stages.placement import Stages
from controlplane.policies.stages.record import BOUNDARY_PREFIX, LAYOUT_PREFIX, BoundaryRecord, StageRecord
from controlplane.scheduler.policy_switch import PolicySwitch
from mesh.store.followed_prefix import FollowedPrefix
from mesh.store.interface import StateStore

log = logging.getLogger(__name__)

TICK_S = 0.1


class StageWatch:
    """Plans and boundaries from the store; a policy that is switched to is told of all of them."""

    def __init__(self, store: StateStore, switch: PolicySwitch) -> None:
        self._switch = switch
        self._plans = FollowedPrefix(store, LAYOUT_PREFIX, StageRecord, self._changed)
        self._boundaries = FollowedPrefix(store, BOUNDARY_PREFIX, BoundaryRecord, self._changed)
        self._policy: Stages | None = None
        self._told: dict[str, StageLayout] = {}
        self._is_current = False

    async def follow(self) -> None:
        """Keep the placement policy at the stored plans and boundaries, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._plans.follow())
            tasks.create_task(self._boundaries.follow())
            tasks.create_task(self._keep())

    def layouts(self) -> dict[str, StageLayout]:
        """Of every model with a plan, at the boundaries found since."""
        found = {}
        for record in self._plans.records.values():
            revision, members = record.layout.revision, set(record.layout.instance_ids)
            boundaries = {
                each.instance_id: each.boundary_tokens
                for each in self._boundaries.records.values()
                if each.revision == revision and each.instance_id in members and each.boundary_tokens
            }
            found[record.layout.model] = record.layout.refined(boundaries)
        return found

    def apply(self) -> None:
        """Tell the policy in force what it does not know yet."""
        policy = self._switch.configured
        if not isinstance(policy, Stages):
            self._policy = None
            return
        if policy is self._policy and self._is_current:
            return
        if policy is not self._policy:
            self._told = {}
        layouts = self.layouts()
        for model in sorted(self._told.keys() - layouts.keys()):
            log.warning("no stage plan any more: all instances are one stage", extra={"model": model})
            policy.use_layout(model, None)
        for model, layout in layouts.items():
            policy.use_layout(model, layout)
        self._policy, self._told, self._is_current = policy, layouts, True

    def _changed(self, key: str, record: StageRecord | BoundaryRecord | None) -> None:
        self._is_current = False

    async def _keep(self) -> None:
        while True:
            self.apply()
            await asyncio.sleep(TICK_S)
