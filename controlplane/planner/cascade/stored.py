"""What the state store holds of cascades: their records, goals and plans; and how a plan comes into force there."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from controlplane.model.cascade_goal import GOALS_PREFIX, PLANS_PREFIX, CascadeGoal
from controlplane.model.cascade_record import CASCADES_PREFIX, CascadeRecord
from controlplane.planning.cascade.plan import CascadePlan, decode_plan, encode_plan
from controlplane.planning.instance_profile import PROFILES_PREFIX, InstanceProfile
from mesh.errors import ConfigurationError, PlanInfeasible, StoreConflict, StoreError
from mesh.store.interface import KeyValue, StateStore

log = logging.getLogger(__name__)

ATTEMPTS = 5
"""At changing a record that others change at the same time."""

Value = TypeVar("Value", CascadeGoal, CascadeRecord)


@dataclass(frozen=True, slots=True)
class StoredCascade:
    """All of one cascade, with the revisions of the keys; None and 0 for what there is not."""

    record: CascadeRecord | None
    record_revision: int
    goal: CascadeGoal | None
    goal_revision: int
    plan: CascadePlan | None
    plan_revision: int

    @property
    def reason_to_plan(self) -> str:
        """Why the plan in force does not count, be there one or not; empty: it does, whoever has made it."""
        if self.plan is None:
            return "it is the first workload"
        if self.record is not None and self.plan.judge and self.record.judges[:1] != (self.plan.judge,):
            return f"the plan in force is by the scores of {self.plan.judge}"
        if self.record is not None and self.record.tiers != tuple(tier.model for tier in self.plan.tiers):
            return "the plan in force is for other tiers"
        if self.goal_revision > self.plan_revision:
            return "the goal was set after the plan in force"
        return ""

    def is_other_than(self, before: "StoredCascade") -> bool:
        """Whether any of it has been written since."""
        then = before.record_revision, before.goal_revision, before.plan_revision
        return then != (self.record_revision, self.goal_revision, self.plan_revision)


class CascadeStore:
    """Reads when asked, so that nothing is decided by what was heard some time ago. All raise `StoreError`."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._applying = asyncio.Lock()

    async def cascade(self, name: str) -> StoredCascade:
        """What is stored now. What cannot be read is logged and counts as absent."""
        record = await self._store.get(CASCADES_PREFIX + name)
        goal = await self._store.get(GOALS_PREFIX + name)
        plan = await self._store.get(PLANS_PREFIX + name)
        return StoredCascade(
            record=_decoded(record, CascadeRecord),
            record_revision=record.mod_revision if record else 0,
            goal=_decoded(goal, CascadeGoal),
            goal_revision=goal.mod_revision if goal else 0,
            plan=_plan(plan),
            plan_revision=plan.mod_revision if plan else 0,
        )

    async def names(self) -> tuple[str, ...]:
        """Cascades that have a goal or a plan."""
        prefixes = (GOALS_PREFIX, PLANS_PREFIX)
        listings = [await self._store.range(prefix) for prefix in prefixes]
        return tuple(
            sorted(
                {
                    entry.key.removeprefix(prefix)
                    for prefix, listing in zip(prefixes, listings, strict=True)
                    for entry in listing.entries
                }
            )
        )

    async def plan_json(self, name: str) -> tuple[int, str]:
        """(revision, JSON) of the plan in force; (0, "") while there is none."""
        entry = await self._store.get(PLANS_PREFIX + name)
        return (0, "") if entry is None else (entry.mod_revision, entry.value.decode())

    async def profiles(self) -> dict[str, InstanceProfile]:
        """Those that can be read: one of another version is as good as none."""
        profiles: dict[str, InstanceProfile] = {}
        for entry in (await self._store.range(PROFILES_PREFIX)).entries:
            try:
                profile = msgspec.json.decode(entry.value, type=InstanceProfile)
            except msgspec.MsgspecError as error:
                log.warning("a profile cannot be read", extra={"key": entry.key, "error": str(error)})
                continue
            profiles[entry.key.removeprefix(PROFILES_PREFIX)] = profile
        return profiles

    async def set_goal(self, goal: CascadeGoal) -> int:
        """Write it; returns the revision."""
        return await self._store.put(goal.key, msgspec.json.encode(goal))

    async def remove_goal(self, name: str) -> bool:
        """Delete it; False if there was none."""
        return await self._store.delete(GOALS_PREFIX + name)

    async def apply(self, plan: CascadePlan, check: Callable[[], None] = lambda: None) -> int:
        """Put a plan into force; returns its revision.

        Thresholds first, and only in the record as it stands at that moment: an operator who changes the cascade
        meanwhile is not overwritten, and a plan that does not fit what he made of it is refused before instances
        follow.
        `check` raises if whoever made the plan may not apply it any more. It is called between reading the record and
        writing it, and the record is written only as it was read: what a later leader has written stays.
        Raises `PlanInfeasible` for a plan that contradicts itself or the cascade, and `StoreError`; then the thresholds
        are as before.
        """
        async with self._applying:
            for _ in range(ATTEMPTS):
                entry = await self._store.get(CASCADES_PREFIX + plan.name)
                record = fitting_record(plan, _decoded(entry, CascadeRecord))
                planned = msgspec.structs.replace(record, thresholds=plan.thresholds, plan_revision=0)
                before = entry.mod_revision if entry else 0
                check()
                revision = await self._store.compare_and_swap(record.key, before, msgspec.json.encode(planned))
                if revision is not None:
                    return await self._deploy(plan, record, planned, revision)
        raise StoreConflict(f"cascade {plan.name} is being changed by others all the time; apply the plan again")

    async def _deploy(self, plan: CascadePlan, former: CascadeRecord, planned: CascadeRecord, revision: int) -> int:
        try:
            plan_revision = await self._put_plan(plan)
        except StoreError:
            await self._try_to_swap(former, revision, "the thresholds of a plan that is not in force still hold")
            raise
        named = msgspec.structs.replace(planned, plan_revision=plan_revision)
        await self._try_to_swap(named, revision, "the cascade does not say which plan its thresholds are of")
        return plan_revision

    async def _put_plan(self, plan: CascadePlan) -> int:
        key, content = PLANS_PREFIX + plan.name, encode_plan(plan)
        try:
            return await self._store.put(key, content)
        except StoreError:
            written = await self._store.get(key)  # it may have happened nevertheless
            if written is None or written.value != content:
                raise
            return written.mod_revision

    async def _try_to_swap(self, record: CascadeRecord, revision: int, otherwise: str) -> None:
        """Unless somebody has changed it: his is newer."""
        try:
            await self._store.compare_and_swap(record.key, revision, msgspec.json.encode(record))
        except StoreError as error:
            log.error(otherwise, extra={"cascade": record.name, "error": str(error)})


def fitting_record(plan: CascadePlan, record: CascadeRecord | None) -> CascadeRecord:
    """The cascade that a plan is for. Raises `PlanInfeasible` where it contradicts it or itself."""
    plan.checked()
    models = tuple(tier.model for tier in plan.tiers)
    if record is None:
        raise PlanInfeasible(
            f"there is no cascade {plan.name}, which the plan is for: set it up first (penstock cascade set)"
        )
    if record.tiers != models:
        raise PlanInfeasible(
            f"the plan for {plan.name} is for the tiers {', '.join(models)}, the cascade has {', '.join(record.tiers)}"
        )
    if plan.judge and record.judges[:1] != (plan.judge,):
        raise PlanInfeasible(
            f"the plan for {plan.name} has thresholds for the scores of {plan.judge}, the cascade is judged by "
            f"{record.judges[0] if record.judges else 'nobody'}: scores of different judges do not compare, plan anew"
        )
    return record


def _decoded(entry: KeyValue | None, kind: type[Value]) -> Value | None:
    if entry is None:
        return None
    try:
        return msgspec.json.decode(entry.value, type=kind).checked()
    except (msgspec.MsgspecError, ConfigurationError) as error:
        log.error("a record of the store cannot be used", extra={"key": entry.key, "error": str(error)})
        return None


def _plan(entry: KeyValue | None) -> CascadePlan | None:
    if entry is None:
        return None
    try:
        return decode_plan(entry.value)
    except PlanInfeasible as error:
        log.error("a plan of the store cannot be used", extra={"key": entry.key, "error": str(error)})
        return None
