"""Starts and drains instances as the plan in force says."""

import asyncio
import logging
from collections.abc import Callable

from controlplane.model.cascade_goal import PLANS_PREFIX
from controlplane.planning.cascade.plan import CascadePlan, PlannedTier
from mesh.errors import ConfigurationError
from mesh.membership import Directory
from mesh.store.interface import StateStore
from mesh.store.stored_folder import StoredFolder
from services.cli.supervisor.replicas import Change, Shape, change_of
from services.cli.supervisor.supervisor import ProcessSpec, Supervisor

log = logging.getLogger(__name__)

DRAIN_S = 120.0
"""An instance that is no longer planned has so long to move or finish what it runs."""
READY_TIMEOUT_S = 300.0


class PlanFollower:
    """One change at a time; a plan that comes meanwhile is followed after, and only the latest."""

    def __init__(
        self,
        store: StateStore,
        directory: Directory,
        supervisor: Supervisor,
        make_spec: Callable[[str, str, Shape], ProcessSpec],
        running: dict[str, dict[str, Shape]],
        on_event: Callable[[str], None],
        on_ended: Callable[[str], None],
    ) -> None:
        """`make_spec` makes the process of (model, name, shape) and raises `ConfigurationError` where it cannot be run
        here; `running`: by model, what was started at the beginning; `on_ended`: an instance is gone for good."""
        self._directory = directory
        self._supervisor = supervisor
        self._make_spec = make_spec
        self._running = running
        self._on_event = on_event
        self._on_ended = on_ended
        self._plans: dict[str, CascadePlan] = {}
        self._news = asyncio.Event()
        self._folder = StoredFolder(store, PLANS_PREFIX, CascadePlan, CascadePlan.checked, self._on_plan)

    async def follow(self) -> None:
        """For ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._folder.follow())
            group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            plans, self._plans = self._plans, {}
            for plan in plans.values():
                for tier in plan.tiers:
                    await self._reach(plan.name, tier)

    async def _reach(self, cascade: str, tier: PlannedTier) -> None:
        self._forget_ended(tier.model)
        running = self._running.setdefault(tier.model, {})
        change = change_of(tier, running)
        if not change.start and not change.end:
            return
        self._on_event(
            f"plan of {cascade}: {tier.model} gets {len(change.start)} new instances and loses {len(change.end)}"
        )
        if change.starts_first:
            await self._start(tier.model, change)
            await self._end(tier.model, change)
        else:
            await self._end(tier.model, change)
            await self._start(tier.model, change)

    def _forget_ended(self, model: str) -> None:
        """Those that an operator has drained."""
        alive = self._supervisor.names()
        for name in [name for name in self._running.get(model, {}) if name not in alive]:
            del self._running[model][name]
            self._on_ended(name)

    async def _start(self, model: str, change: Change) -> None:
        for name, shape in change.start:
            try:
                await self._supervisor.add(self._make_spec(model, name, shape))
            except ConfigurationError as error:
                self._on_event(f"{name} is planned, but cannot be started here: {error}")
                continue
            self._running[model][name] = shape
            try:
                async with asyncio.timeout(READY_TIMEOUT_S):
                    await self._joined(name)
            except TimeoutError:
                self._on_event(f"{name} was started, but did not join within {READY_TIMEOUT_S:g} s; see its log")

    async def _end(self, model: str, change: Change) -> None:
        for name in change.end:
            if name in self._supervisor.names():
                await self._supervisor.remove(name, DRAIN_S)
            self._running[model].pop(name, None)
            self._on_ended(name)

    async def _joined(self, name: str) -> None:
        joined = asyncio.Event()
        unsubscribe = self._directory.subscribe(
            lambda change: joined.set() if change.member.member_id == name else None
        )
        try:
            await joined.wait()
        finally:
            unsubscribe()

    def _on_plan(self, name: str, plan: CascadePlan | None) -> None:
        if plan is not None:
            self._plans[name] = plan
            self._news.set()
