"""Starts and drains instances as the plans in force say."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress

from controlplane.model.cascade_goal import PLANS_PREFIX
from controlplane.model.cascade_record import CASCADES_PREFIX, CascadeRecord
from controlplane.model.deployment_record import DeploymentRecord
from controlplane.planning.cascade.plan import CascadePlan
from mesh.errors import ConfigurationError, PlanInfeasible
from mesh.store.interface import StateStore
from mesh.store.stored_folder import StoredFolder
from services.cli.supervisor.deployment_notice import DeploymentNotice
from services.cli.supervisor.failed_starts import FailedStarts
from services.cli.supervisor.fleet import Fleet
from services.cli.supervisor.replicas import Shape, Standing, wanted_by
from services.cli.supervisor.shortfall import STARTING, deployment_record
from services.cli.supervisor.steps import Situation, Start, TierShape, next_steps

log = logging.getLogger(__name__)

LINGER_S = 60.0
"""A tier that a plan leaves out keeps one instance so long, for requests that came under the thresholds before."""
LOOK_S = 0.5
"""Between two looks at the processes, while there is a plan."""


class PlanFollower:
    """Brings the fleet towards the sum of all plans in force, step by step, and says what is missing until it is there.

    Another plan supersedes at once; what is under way then is judged anew.
    """

    def __init__(self, name: str, store: StateStore, fleet: Fleet, on_event: Callable[[str], None]) -> None:
        """`name`: the supervisor's, under which it tells of its progress."""
        self._name = name
        self._fleet = fleet
        fleet.on_change = self.wake
        self._on_event = on_event
        self._news = asyncio.Event()
        self._failed = FailedStarts()
        self._unserved: set[TierShape] = set()
        """What has failed since its tier was served last."""
        self._former: dict[str, Shape] = {}
        self._drained: Counter[TierShape] = Counter()
        self._lingers_until_s: dict[str, float] = {}
        self._in_force: dict[str, tuple[int, CascadePlan]] = {}
        self._said: list[str] = []
        self._notice = DeploymentNotice(store)
        self._plans = StoredFolder(store, PLANS_PREFIX, CascadePlan, _check, self._on_change)
        self._cascades = StoredFolder(store, CASCADES_PREFIX, CascadeRecord, CascadeRecord.checked, self._on_change)

    def wake(self) -> None:
        """Something may have to be done."""
        self._news.set()

    async def follow(self) -> None:
        """For ever."""
        unsubscribe = self._fleet.directory.subscribe(lambda _: self.wake())
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._plans.follow())
                group.create_task(self._cascades.follow())
                group.create_task(self._notice.keep())
                group.create_task(self._work())
        finally:
            unsubscribe()
            await self._fleet.stop()

    def put_in_force(self, plans: Mapping[str, tuple[int, CascadePlan]]) -> None:
        """From now on these hold, by cascade, with their revisions. Of models whose plans are others than before, what
        failed is tried afresh and what operators drained comes back."""
        others = {cascade: plan for cascade, plan in self._in_force.items() if plans.get(cascade) != plan}
        news = {cascade: plan for cascade, plan in plans.items() if self._in_force.get(cascade) != plan}
        if not others and not news:
            return
        before = wanted_by(plan for _, plan in self._in_force.values())
        self._in_force = dict(plans)
        models = {tier.model for _, plan in (*others.values(), *news.values()) for tier in plan.tiers}
        self._failed.forget(models)
        self._unserved = {key for key in self._unserved if key[0] not in models}
        self._drained = Counter({key: count for key, count in self._drained.items() if key[0] not in models})
        wanted = wanted_by(plan for _, plan in plans.values())
        until_s = self._fleet.clock() + LINGER_S
        for model, counts in wanted.items():
            if counts:
                self._lingers_until_s.pop(model, None)
            elif before.get(model, True):
                self._lingers_until_s[model] = until_s
        for cascade, (revision, _) in news.items():
            if revision:
                self._on_event(f"the plan for {cascade}, revision {revision}, is followed")
        for cascade in sorted(others.keys() - plans.keys()):
            self._on_event(f"no plan for {cascade} is followed any more")

    async def turn(self) -> DeploymentRecord:
        """Look, do what can be begun now, and say how far it is."""
        sight = self._fleet.look()
        for key, why in sight.failed:
            self._note_failure(key, why)
        for key in sight.drained:
            self._note_drained(key)
        for replica in self._fleet.replicas:
            if replica.standing is Standing.SERVING:
                self._former[replica.model] = replica.shape
                self._unserved = {key for key in self._unserved if key[0] != replica.model}
        for step in next_steps(self._situation()):
            if isinstance(step, Start):
                await self._start(step.model, step.shape)
            else:
                self._on_event(f"{step.name} is drained and ended")
                self._fleet.end(step.name)
        return self._told()

    async def _work(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S if self._in_force else None):
                    await self._news.wait()
            self._news.clear()
            await self.turn()

    async def _start(self, model: str, shape: Shape) -> None:
        try:
            name = await self._fleet.start(model, shape)
        except ConfigurationError as error:
            self._note_failure((model, shape), str(error))
            return
        stands_in = shape not in self._wanted().get(model, {})
        why = "until one as planned can be" if stands_in else "as planned"
        self._on_event(f"{name} is started {why}, {_in_words(*shape)}")

    def _note_failure(self, key: TierShape, why: str) -> None:
        self._unserved.add(key)
        failure = self._failed.note(key, why, self._fleet.clock())
        if key[0] in self._wanted():
            self._on_event(f"{why}; it is tried again in {failure.again_s - failure.last_s:g} s at the earliest")

    def _note_drained(self, key: TierShape) -> None:
        """An operator's word holds until the next plan, if the instance was one that stays."""
        model, shape = key
        staying = [each for each in self._fleet.replicas if each.standing is not Standing.ENDING]
        left = sum((each.model, each.shape) == key for each in staying)
        if self._wanted().get(model, Counter())[shape] > left:
            self._drained[key] += 1

    def _wanted(self) -> Mapping[str, Counter[Shape]]:
        """Without what operators have drained since."""
        wanted = wanted_by(plan for _, plan in self._in_force.values())
        taken = self._taken_away(wanted)
        return {
            model: Counter({shape: count - taken[model, shape] for shape, count in counts.items()}) + Counter()
            for model, counts in wanted.items()
        }

    def _taken_away(self, wanted: Mapping[str, Counter[Shape]]) -> Counter[TierShape]:
        """Of what is wanted, by operators."""
        found: Counter[TierShape] = Counter()
        for (model, shape), count in self._drained.items():
            found[model, shape] = min(count, wanted.get(model, Counter())[shape])
        return +found

    def _situation(self) -> Situation:
        now_s = self._fleet.clock()
        return Situation(
            replicas=self._fleet.replicas,
            wanted=self._wanted(),
            free=self._fleet.gpus.free,
            room_of=self._fleet.gpus.room_of,
            failed=frozenset(self._unserved),
            held=self._failed.held(now_s),
            spent=self._failed.spent,
            former=self._former,
            lingering=frozenset(model for model, until_s in self._lingers_until_s.items() if now_s < until_s),
        )

    def _told(self) -> DeploymentRecord:
        record = deployment_record(
            self._name,
            {cascade: revision for cascade, (revision, _) in self._in_force.items()},
            self._situation(),
            self._failed.reasons(),
            self._taken_away(wanted_by(plan for _, plan in self._in_force.values())),
            self._fleet.gpus.unit,
        )
        if self._notice.say(record):
            self._say(record)
        return record

    def _say(self, record: DeploymentRecord) -> None:
        """Each line once, for as long as it holds."""
        lines = [
            f"NOT as planned: {each.model} lacks {each.count} ({_in_words(each.tp, each.pp)}): {each.why}"
            for each in record.missing
            if each.why != STARTING
        ]
        if record.is_reached and record.plans:
            lines.append("all instances run as planned")
        for line in lines:
            if line not in self._said:
                self._on_event(line)
        self._said = lines

    def _on_change(self, _name: str, _record: object) -> None:
        """A plan counts while its cascade is set up with the same tiers."""
        plans: dict[str, tuple[int, CascadePlan]] = {}
        for name, plan in sorted(self._plans.records.items()):
            cascade = self._cascades.records.get(name)
            if cascade is None or cascade.tiers != tuple(tier.model for tier in plan.tiers):
                continue
            followed = self._in_force.get(name)
            only_thresholds_changed = followed is not None and followed[1] == plan and not cascade.plan_revision
            other_is_not_heard_yet = cascade.plan_revision and cascade.thresholds != plan.thresholds
            if not only_thresholds_changed and not other_is_not_heard_yet:
                plans[name] = (cascade.plan_revision, plan)
            elif followed is not None:
                plans[name] = followed
        self.put_in_force(plans)
        self.wake()


def _check(plan: CascadePlan) -> None:
    """Raises `ConfigurationError` for a plan that contradicts itself: it never takes the place of a good one."""
    try:
        plan.checked()
    except PlanInfeasible as error:
        raise ConfigurationError(str(error)) from error


def _in_words(tp: int, pp: int) -> str:
    return f"TP={tp}" + (f", PP={pp}" if pp > 1 else "")
