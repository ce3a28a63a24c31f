"""Starts and drains instances as the plan in force says."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from controlplane.model.cascade_goal import PLANS_PREFIX
from controlplane.planning.cascade.plan import CascadePlan
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
        has_room: Callable[[Shape, Sequence[str]], bool],
    ) -> None:
        """`make_spec` makes the process of (model, name, shape) and raises `ConfigurationError` where it cannot be run
        here; `running`: by model, what was started at the beginning; `on_ended`: an instance is gone for good;
        `has_room`: whether there are GPUs for an instance of this shape once those named have ended."""
        self._directory = directory
        self._supervisor = supervisor
        self._make_spec = make_spec
        self._running = running
        self._on_event = on_event
        self._on_ended = on_ended
        self._has_room = has_room
        self._plans: dict[str, CascadePlan] = {}
        self._news = asyncio.Event()
        self._folder = StoredFolder(store, PLANS_PREFIX, CascadePlan, CascadePlan.checked, self._on_plan)

    async def follow(self) -> None:
        """For ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._folder.follow())
            group.create_task(self._work())

    async def reach(self, plan: CascadePlan) -> None:
        """Start and end instances until those of the plan run. Where GPUs are short, what frees some comes first."""
        pending: list[tuple[str, Change]] = []
        for tier in plan.tiers:
            self._forget_ended(tier.model)
            change = change_of(tier, self._running.setdefault(tier.model, {}))
            if not change.start and not change.end:
                continue
            self._on_event(
                f"plan of {plan.name}: {tier.model} gets {len(change.start)} new instances and loses {len(change.end)}"
            )
            pending.append((tier.model, change))
        pending.sort(key=lambda each: bool(each[1].start))
        while pending:
            left = [(model, await self._advance(model, change)) for model, change in pending]
            if left == pending:
                break
            pending = [(model, change) for model, change in left if change.start or change.end]
        for model, change in pending:
            await self._start(model, change.start)  # which says what is missing

    async def _work(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            plans, self._plans = self._plans, {}
            for plan in plans.values():
                await self.reach(plan)

    async def _advance(self, model: str, change: Change) -> Change:
        """Do what there are GPUs for; returns what remains."""
        start, end = change.start, change.end
        makes_room = change.starts_first and self._needs_room_of(start[0][1], end)
        if makes_room:
            self._on_event(f"nobody serves {model} until {start[0][0]} does: there are no GPUs for old and new at once")
        if end and (makes_room or not change.starts_first):
            await self._end(model, end)
            end = ()
        fitting = 0
        while fitting < len(start) and self._has_room(start[fitting][1], ()):
            await self._start(model, start[fitting : fitting + 1])
            fitting += 1
        if end and self._running[model].keys() - set(end):
            await self._end(model, end)
            end = ()
        return Change(start[fitting:], end, starts_first=bool(end))

    def _needs_room_of(self, shape: Shape, names: tuple[str, ...]) -> bool:
        """Whether an instance of this shape can be started once these have ended, and not before."""
        return not self._has_room(shape, ()) and self._has_room(shape, names)

    def _forget_ended(self, model: str) -> None:
        """Those that an operator has drained."""
        alive = self._supervisor.names()
        for name in [name for name in self._running.get(model, {}) if name not in alive]:
            del self._running[model][name]
            self._on_ended(name)

    async def _start(self, model: str, instances: tuple[tuple[str, Shape], ...]) -> None:
        for name, shape in instances:
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

    async def _end(self, model: str, names: tuple[str, ...]) -> None:
        for name in names:
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
