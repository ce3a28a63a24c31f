"""Which instances run where a supervisor starts them. Pure: plans and looks at processes in, starts and ends out."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from controlplane.deployment.deployment_status import STARTING, DeploymentStatus, deployment_status
from controlplane.deployment.failed_starts import FailedStarts
from controlplane.deployment.gpus import GpuPool
from controlplane.deployment.replicas import (
    Replica,
    ReplicaState,
    Shape,
    new_name,
    wanted_by,
    with_scales,
)
from controlplane.deployment.steps import Situation, Start, TierShape, next_steps
from controlplane.model.autoscale_record import ScaleRecord
from controlplane.model.cascade_record import CascadeRecord
from controlplane.model.replica_kind import shapes_on
from controlplane.planning.cascade.plan import CascadePlan
from mesh.invariants import invariants

LINGER_S: Final = 60.0
"""A tier that a plan leaves out keeps one instance so long, for requests that came under the thresholds before."""

INSTANCE_TRANSITIONS: Final[Mapping[ReplicaState, frozenset[ReplicaState]]] = {
    ReplicaState.STARTING: frozenset({ReplicaState.SERVING, ReplicaState.FAILED, ReplicaState.ENDING}),
    ReplicaState.SERVING: frozenset({ReplicaState.STARTING, ReplicaState.FAILED, ReplicaState.ENDING}),
    ReplicaState.FAILED: frozenset({ReplicaState.STARTING, ReplicaState.SERVING, ReplicaState.ENDING}),
    ReplicaState.ENDING: frozenset(),
}
"""An instance leaves the mesh and rejoins while its process is started again; a failed one may join late. None comes
back from ENDING: its name is free once it has ended."""


@dataclass(frozen=True, slots=True)
class RecordsChanged:
    """The state store holds these plans, cascades and scales now, by name; every plan is consistent in itself."""

    plans: Mapping[str, CascadePlan]
    cascades: Mapping[str, CascadeRecord]
    scales: Mapping[str, ScaleRecord] = field(default_factory=dict)
    """By model."""
    shapes: Mapping[str, Shape] | None = None
    """Of the models that can be scaled here from now on; None: the same as before."""


@dataclass(frozen=True, slots=True)
class Looked:
    """The processes and the mesh as they are now; every `StepsTaken` follows one of these."""

    names: frozenset[str]
    """Of all processes that the supervisor keeps running."""
    given_up: Mapping[str, str]
    """Why it does not start these again, by name."""
    joined: Mapping[str, str]
    """Incarnation of each worker in the mesh, by name."""
    waiting: Mapping[str, str] = field(default_factory=dict)
    """What those wait for that have no place to run at yet, by name."""


@dataclass(frozen=True, slots=True)
class Started:
    """The process of an instance runs."""

    name: str


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The process of an instance cannot be run here."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The process of an instance that was to end is gone, and with it all that it had started."""

    name: str


@dataclass(frozen=True, slots=True)
class StepsTaken:
    """All that a `Looked` led to is done or begun."""


@dataclass(frozen=True, slots=True)
class StartInstance:
    """Start a process; answer with `Started` or `StartFailed` before anything else."""

    name: str
    model: str
    shape: Shape
    environment: Mapping[str, str]
    """By which it has its GPUs."""


@dataclass(frozen=True, slots=True)
class EndInstance:
    """End a process, and answer with `Ended` when it is gone; that may take as long as its requests."""

    name: str
    drains: bool
    """Whether it serves requests that are to be finished or moved first."""


@dataclass(frozen=True, slots=True)
class Say:
    """Tell the user, in one line."""

    line: str


@dataclass(frozen=True, slots=True)
class Publish:
    """Keep this in the state store from now on."""

    status: DeploymentStatus


DeploymentEvent: TypeAlias = RecordsChanged | Looked | Started | StartFailed | Ended | StepsTaken
DeploymentInstruction: TypeAlias = StartInstance | EndInstance | Say | Publish


@dataclass(slots=True)
class _Instance:
    model: str
    shape: Shape
    formerly: str = ""
    """Incarnation that had the name when this one was started; it may be listed until its lease has run out."""
    state: ReplicaState = ReplicaState.STARTING
    unjoined_since_s: float | None = None
    failure: str = ""

    def enter(self, state: ReplicaState) -> None:
        allowed = state is self.state or state in INSTANCE_TRANSITIONS[self.state]
        assert allowed, f"an instance of {self.model} cannot go from {self.state} to {state}"
        self.state = state


@dataclass(slots=True)
class _Plans:
    """What is followed, and what became of it since."""

    in_force: dict[str, tuple[int, CascadePlan]] = field(default_factory=dict)
    """By cascade, with the plan's revision; 0 where it was heard of only after an operator had set thresholds."""
    failed: FailedStarts = field(default_factory=FailedStarts)
    unserved: set[TierShape] = field(default_factory=set)
    """What has failed since its tier was served last."""
    drained: Counter[TierShape] = field(default_factory=Counter)
    """What operators have drained: they are not to come back by themselves."""
    lingers_until_s: dict[str, float] = field(default_factory=dict)
    scales: dict[str, ScaleRecord] = field(default_factory=dict)
    """Of models that can be started here."""
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    """In which a model runs here, where no plan says otherwise."""
    gpu_kind: str = ""
    """Of this machine; scales say of which kind replicas are to be."""

    @property
    def planned(self) -> Mapping[str, Counter[Shape]]:
        planned = wanted_by(plan for _, plan in self.in_force.values())
        scales = {
            model: shapes_on(self.gpu_kind, each.kinds) if each.kinds else each.replicas
            for model, each in self.scales.items()
        }
        return with_scales(planned, scales, self.shapes)

    @property
    def taken_away(self) -> Counter[TierShape]:
        """Of what is planned, by operators."""
        planned = self.planned
        found: Counter[TierShape] = Counter()
        for (model, shape), count in self.drained.items():
            found[model, shape] = min(count, planned.get(model, Counter())[shape])
        return +found

    @property
    def wanted(self) -> Mapping[str, Counter[Shape]]:
        """What is planned, without what operators have drained since."""
        taken = self.taken_away
        return {
            model: Counter({shape: count - taken[model, shape] for shape, count in counts.items()}) + Counter()
            for model, counts in self.planned.items()
        }


class DeploymentManager:
    """Brings the instances of one machine towards the sum of all plans in force, step by step.

    Feed every event to `handle` and carry out what comes back, in order; times are seconds on the holder's clock.
    Another plan supersedes at once; what is under way then is judged anew. Instances of models without a plan are left
    alone.
    """

    def __init__(
        self,
        supervisor: str,
        gpus: GpuPool,
        ready_s: float,
        running: Mapping[str, Mapping[str, Shape]],
        shapes: Mapping[str, Shape] | None = None,
        gpu_kind: str = "",
    ) -> None:
        """`supervisor`: under whose name the status is published. An instance that has not joined the mesh for
        `ready_s` has failed. `running`: what was started before, by model and name, its GPUs taken. `shapes`: of the
        models that can be scaled here. `gpu_kind`: of this machine's GPUs; of scales that name kinds, those of another
        are left to others."""
        self.status: DeploymentStatus | None = None
        """As last published; None before the first `StepsTaken`."""
        self._supervisor = supervisor
        self._gpus = gpus
        self._ready_s = ready_s
        self._instances = {
            name: _Instance(model, shape) for model, shapes in running.items() for name, shape in shapes.items()
        }
        """In the order in which they were started."""
        self._joined: Mapping[str, str] = {}
        self._waiting: Mapping[str, str] = {}
        self._plans = _Plans(shapes=dict(shapes or {}), gpu_kind=gpu_kind)
        self._former: dict[str, Shape] = {}
        """What last served each model."""
        self._said: list[str] = []

    @property
    def follows_plans(self) -> bool:
        """Whether any plan or scale is in force, so that the processes have to be looked at."""
        return bool(self._plans.in_force or self._plans.scales)

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """Of all models, planned or not, as of the last event; in the order in which they were started."""
        return tuple(Replica(name, it.model, it.shape, it.state) for name, it in self._instances.items())

    def handle(self, event: DeploymentEvent, now_s: float) -> tuple[DeploymentInstruction, ...]:
        """Take in an event; returns what is to be done about it, in order."""
        match event:
            case RecordsChanged(plans, cascades, scales, shapes):
                self._plans.shapes = self._plans.shapes if shapes is None else shapes
                scaled = self._scale(scales)
                return (*self._follow(self._counting(plans, cascades), now_s), *scaled)
            case Looked():
                return self._look(event, now_s)
            case Started(name):
                instance = self._instances[name]
                stands_in = instance.shape not in self._plans.wanted.get(instance.model, {})
                why = "until one as planned can be" if stands_in else "as planned"
                return (Say(f"{name} is started {why}, {_in_words(*instance.shape)}"),)
            case StartFailed(name, why):
                instance = self._forget(name)
                return self._note_failure((instance.model, instance.shape), why, now_s)
            case Ended(name):
                self._forget(name)
                return ()
            case StepsTaken():
                return self._tell(now_s)

    @invariants
    def validate(self) -> None:
        """Check what must hold between two events. Raises `InvariantBroken`."""
        self._gpus.validate()
        assert self._instances.keys() <= self._gpus.holders, "every instance holds GPUs, or a place, until it has ended"
        for name, instance in self._instances.items():
            failed = instance.state is ReplicaState.FAILED
            ending = instance.state is ReplicaState.ENDING
            assert ending or failed == bool(instance.failure), f"{name} is {instance.state}: {instance.failure!r}"
        wanted, planned = self._plans.wanted, self._plans.planned
        assert all(counts <= planned[model] for model, counts in wanted.items()), "operators only take away"
        assert all(count > 0 for count in self._plans.drained.values()), "what was drained is counted"

    # -- plans

    def _counting(
        self, plans: Mapping[str, CascadePlan], cascades: Mapping[str, CascadeRecord]
    ) -> dict[str, tuple[int, CascadePlan]]:
        """A plan counts while its cascade is set up with the same tiers. Either may be heard of first."""
        found: dict[str, tuple[int, CascadePlan]] = {}
        for name, plan in sorted(plans.items()):
            cascade = cascades.get(name)
            if cascade is None or cascade.tiers != tuple(tier.model for tier in plan.tiers):
                continue
            followed = self._plans.in_force.get(name)
            only_thresholds_changed = followed is not None and followed[1] == plan and not cascade.plan_revision
            other_is_not_heard_yet = cascade.plan_revision and cascade.thresholds != plan.thresholds
            if not only_thresholds_changed and not other_is_not_heard_yet:
                found[name] = (cascade.plan_revision, plan)
            elif followed is not None:
                found[name] = followed
        return found

    def _follow(self, plans: dict[str, tuple[int, CascadePlan]], now_s: float) -> tuple[DeploymentInstruction, ...]:
        """From now on these hold. Of models whose plans are others than before, what failed is tried afresh and what
        operators drained comes back."""
        state = self._plans
        others = {cascade: plan for cascade, plan in state.in_force.items() if plans.get(cascade) != plan}
        news = {cascade: plan for cascade, plan in plans.items() if state.in_force.get(cascade) != plan}
        if not others and not news:
            return ()
        before = state.planned
        state.in_force = plans
        models = {tier.model for _, plan in (*others.values(), *news.values()) for tier in plan.tiers}
        state.failed.forget(models)
        state.unserved = {key for key in state.unserved if key[0] not in models}
        state.drained = Counter({key: count for key, count in state.drained.items() if key[0] not in models})
        for model, counts in state.planned.items():
            if counts:
                state.lingers_until_s.pop(model, None)
            elif before.get(model, True):
                state.lingers_until_s[model] = now_s + LINGER_S
        followed = [
            f"the plan for {cascade}, revision {number}, is followed" for cascade, (number, _) in news.items() if number
        ]
        dropped = [f"no plan for {cascade} is followed any more" for cascade in sorted(others.keys() - plans.keys())]
        return tuple(map(Say, (*followed, *dropped)))

    def _scale(self, scales: Mapping[str, ScaleRecord]) -> tuple[DeploymentInstruction, ...]:
        """Follow these numbers of replicas. What operators drained of a model comes back with another number; what
        failed goes on being tried ever more seldom, since numbers change often and say nothing of that."""
        plans = self._plans
        followed = {model: record for model, record in scales.items() if model in plans.shapes}
        lines: list[DeploymentInstruction] = []
        for model in sorted(followed.keys() | plans.scales.keys()):
            before, after = plans.scales.get(model), followed.get(model)
            if (before and (before.replicas, before.kinds)) == (after and (after.replicas, after.kinds)):
                continue
            plans.drained = Counter({key: count for key, count in plans.drained.items() if key[0] != model})
            if after is None:
                lines.append(Say(f"{model} is not scaled any more"))
            else:
                lines.append(Say(f"{model} is scaled to {after.replicas}: {after.why}"))
        plans.scales = followed
        return tuple(lines)

    # -- processes

    def _look(self, seen: Looked, now_s: float) -> tuple[DeploymentInstruction, ...]:
        """See who has joined, failed or gone, and do what can be begun now."""
        self._joined, self._waiting = seen.joined, seen.waiting
        instructions: list[DeploymentInstruction] = []
        failed: list[tuple[TierShape, str]] = []
        drained: list[TierShape] = []
        for name, instance in list(self._instances.items()):
            if instance.state is ReplicaState.ENDING:
                continue
            if name not in seen.names:
                self._forget(name)
                drained.append((instance.model, instance.shape))
                continue
            has_joined = seen.joined.get(name, instance.formerly) != instance.formerly
            why = self._failure(name, instance, has_joined, seen.given_up, now_s)
            if why and not instance.failure:
                failed.append(((instance.model, instance.shape), why))
            instance.failure = why
            if why:
                instance.enter(ReplicaState.FAILED)
            else:
                instance.enter(ReplicaState.SERVING if has_joined else ReplicaState.STARTING)
        for key, why in failed:
            instructions += self._note_failure(key, why, now_s)
        for key in drained:
            self._note_drained(key)
        for replica in self.replicas:
            if replica.state is ReplicaState.SERVING:
                self._former[replica.model] = replica.shape
                self._plans.unserved = {key for key in self._plans.unserved if key[0] != replica.model}
        for step in next_steps(self._situation(now_s)):
            if isinstance(step, Start):
                instructions.append(self._start(step.model, step.shape, seen.names, now_s))
            else:
                instance = self._instances[step.name]
                drains = instance.state is not ReplicaState.FAILED
                instance.enter(ReplicaState.ENDING)
                instructions += (Say(f"{step.name} is drained and ended"), EndInstance(step.name, drains))
        return tuple(instructions)

    def _start(self, model: str, shape: Shape, names: frozenset[str], now_s: float) -> StartInstance:
        """Of what fits: steps never start more."""
        name = new_name(model, names | self._instances.keys())
        environment = self._gpus.take(name, self._gpus.room_of(shape))
        self._instances[name] = _Instance(model, shape, self._joined.get(name, ""), unjoined_since_s=now_s)
        return StartInstance(name, model, shape, environment)

    def _forget(self, name: str) -> _Instance:
        self._gpus.give_back(name)
        return self._instances.pop(name)

    def _failure(
        self, name: str, instance: _Instance, has_joined: bool, given_up: Mapping[str, str], now_s: float
    ) -> str:
        """Why the instance is of no use; "" while it is, or may yet be."""
        if name in given_up:
            return f"{name} was given up: {given_up[name]}"
        if has_joined:
            instance.unjoined_since_s = None
            return ""
        if instance.unjoined_since_s is None:
            instance.unjoined_since_s = now_s
        if now_s - instance.unjoined_since_s >= self._ready_s:
            why = f"it waits: {self._waiting[name]}" if name in self._waiting else "see its log"
            return f"{name} was not in the mesh for {self._ready_s:g} s; {why}"
        return ""

    def _note_failure(self, key: TierShape, why: str, now_s: float) -> tuple[DeploymentInstruction, ...]:
        self._plans.unserved.add(key)
        failure = self._plans.failed.note(key, why, now_s)
        if key[0] not in self._plans.planned:
            return ()
        return (Say(f"{why}; it is tried again in {failure.again_s - failure.last_s:g} s at the earliest"),)

    def _note_drained(self, key: TierShape) -> None:
        """An operator's word holds until the next plan, if the instance was one that stays."""
        model, shape = key
        staying = [each for each in self.replicas if each.state is not ReplicaState.ENDING]
        left = sum((each.model, each.shape) == key for each in staying)
        if self._plans.wanted.get(model, Counter())[shape] > left:
            self._plans.drained[key] += 1

    # -- what is said of it

    def _situation(self, now_s: float) -> Situation:
        plans = self._plans
        return Situation(
            replicas=self.replicas,
            wanted=plans.wanted,
            free=self._gpus.free,
            room_of=self._gpus.room_of,
            failed=frozenset(plans.unserved),
            held=plans.failed.held(now_s),
            spent=plans.failed.spent,
            former=self._former,
            lingering=frozenset(
                model
                for model, until_s in plans.lingers_until_s.items()
                if now_s < until_s and model not in plans.scales
            ),
            leave_first={model: record.leave_first for model, record in plans.scales.items()},
        )

    def _tell(self, now_s: float) -> tuple[DeploymentInstruction, ...]:
        """The status where it has changed, and each line about it once, for as long as it holds."""
        plans = self._plans
        status = deployment_status(
            self._supervisor,
            {cascade: revision for cascade, (revision, _) in plans.in_force.items()},
            self._situation(now_s),
            plans.failed.reasons(),
            plans.taken_away,
            self._gpus.unit,
            self._waiting,
            plans.gpu_kind,
        )
        if status == self.status:
            return ()
        self.status = status
        lines = [
            f"NOT as planned: {each.model} lacks {each.count} ({_in_words(each.tp, each.pp)}): {each.why}"
            for each in status.missing
            if each.why != STARTING
        ]
        if status.is_reached and status.plans:
            lines.append("all instances run as planned")
        unsaid = [line for line in lines if line not in self._said]
        self._said = lines
        return (Publish(status), *map(Say, unsaid))


def _in_words(tp: int, pp: int) -> str:
    return f"TP={tp}" + (f", PP={pp}" if pp > 1 else "")
