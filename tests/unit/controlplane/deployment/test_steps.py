"""From any instances to any plan that fits: no GPU twice, no tier given up without need, and the plan is reached."""

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from controlplane.deployment.replicas import Replica, ReplicaState, Shape, gpus_of, new_name
from controlplane.deployment.steps import End, Situation, Start, Step, TierShape, next_steps
from controlplane.deployment.tier_status import TierStatus, tier_statuses

ONE, TWO, FOUR = (1, 1), (2, 1), (4, 1)
MODELS = ("small", "medium", "large")
MAX_TRIES = 3


@dataclass
class World:
    """Processes that start and end when the test says so, on so many GPUs."""

    gpus: int
    wanted: dict[str, Counter[Shape]]
    replicas: list[Replica] = field(default_factory=list)
    failures: Counter[TierShape] = field(default_factory=Counter)
    unserved: set[TierShape] = field(default_factory=set)
    held: set[TierShape] = field(default_factory=set)
    former: dict[str, Shape] = field(default_factory=dict)
    lingering: set[str] = field(default_factory=set)
    exchanged: list[str] = field(default_factory=list)
    """Tiers that were served and had their last instance ended."""

    def serve(self, model: str, *shapes: Shape) -> "World":
        for shape in shapes:
            self.replicas.append(Replica(new_name(model, self.names), model, shape, ReplicaState.SERVING))
            self.former[model] = shape
        return self

    @property
    def names(self) -> set[str]:
        return {replica.name for replica in self.replicas}

    @property
    def free(self) -> int:
        return self.gpus - sum(gpus_of(replica.shape) for replica in self.replicas)

    def situation(self) -> Situation:
        spent = frozenset(key for key, count in self.failures.items() if count >= MAX_TRIES)
        return Situation(
            replicas=tuple(self.replicas),
            wanted=self.wanted,
            free=self.free,
            room_of=gpus_of,
            failed=frozenset(self.unserved),
            held=frozenset(self.held),
            spent=spent,
            former=self.former,
            lingering=frozenset(self.lingering),
        )

    def step(self) -> tuple[Step, ...]:
        """Take the next steps, as far as they go without anybody joining or ending."""
        steps = next_steps(self.situation())
        for step in steps:
            if isinstance(step, End):
                self._end(step.name)
            else:
                self.replicas.append(
                    Replica(new_name(step.model, self.names), step.model, step.shape, ReplicaState.STARTING)
                )
            assert self.free >= 0, "no GPU is promised twice"
        return steps

    def _end(self, name: str) -> None:
        replica = self.one(name)
        assert replica.state is not ReplicaState.ENDING, "nothing is ended twice"
        peers = [each for each in self.serving(replica.model) if each.name != name]
        if replica.state is ReplicaState.SERVING and self.wanted.get(replica.model) and not peers:
            self._check_unavoidable(replica)
            self.exchanged.append(replica.model)
        self.become(name, ReplicaState.ENDING)

    def _check_unavoidable(self, last: Replica) -> None:
        waiting = {ReplicaState.STARTING, ReplicaState.ENDING}
        assert not [each for each in self.replicas if each.state in waiting], "nothing under way could give GPUs"
        (tier,) = tier_statuses(
            [each for each in self.replicas if each.model == last.model], {last.model: self.wanted[last.model]}
        )
        assert last in tier.surplus
        needs = [gpus_of(shape) for shape in tier.missing if (last.model, shape) not in self.held]
        assert min(needs) > self.free, "a substitute would have fitted beside it"
        assert min(needs) <= self.free + gpus_of(last.shape), "the substitute fits now"

    def one(self, name: str) -> Replica:
        return next(each for each in self.replicas if each.name == name)

    def become(self, name: str, state: ReplicaState) -> None:
        replica = self.one(name)
        self.replicas[self.replicas.index(replica)] = replace(replica, state=state)
        if state is ReplicaState.SERVING:
            self.former[replica.model] = replica.shape
            self.unserved = {key for key in self.unserved if key[0] != replica.model}

    def fail(self, name: str) -> None:
        replica = self.one(name)
        self.become(name, ReplicaState.FAILED)
        self.failures[replica.model, replica.shape] += 1
        self.held.add((replica.model, replica.shape))
        if not self.serving(replica.model):
            self.unserved.add((replica.model, replica.shape))

    def gone(self, name: str) -> None:
        self.replicas.remove(self.one(name))

    def serving(self, model: str) -> list[Replica]:
        return [each for each in self.replicas if each.model == model and each.state is ReplicaState.SERVING]

    def under_way(self) -> list[Replica]:
        return [each for each in self.replicas if each.state in (ReplicaState.STARTING, ReplicaState.ENDING)]

    def shapes(self, model: str) -> list[Shape]:
        return sorted(each.shape for each in self.serving(model))

    def reached(self) -> bool:
        return all(tier.is_reached for tier in tier_statuses(self.replicas, self.wanted))

    def settle(self) -> None:
        """Whoever starts joins, whoever ends is gone, what failed may be tried again: until nothing happens."""
        for _ in range(200):
            steps = self.step()
            moving = self.under_way()
            for replica in moving:
                if replica.state is ReplicaState.STARTING:
                    self.become(replica.name, ReplicaState.SERVING)
                else:
                    self.gone(replica.name)
            if not steps and not moving and not self.held:
                return
            self.held.clear()
        raise AssertionError("it never comes to rest")


def test_a_tier_that_shrinks_gives_its_gpu_to_one_that_grows() -> None:
    world = World(4, {"small": Counter({ONE: 2}), "large": Counter({ONE: 2})})
    world.serve("small", ONE).serve("large", ONE, ONE, ONE)
    assert world.step() == (End("large-2"),)
    assert world.step() == (), "its GPU is not free yet"
    world.gone("large-2")
    assert world.step() == (Start("small", ONE),)
    world.settle()
    assert world.reached()


def test_an_old_replica_is_ended_when_its_substitute_has_joined() -> None:
    world = World(4, {"large": Counter({TWO: 1})}).serve("large", ONE, ONE)
    assert world.step() == (Start("large", TWO),)
    assert world.step() == ()
    world.fail("large-2")
    assert world.step() == (End("large-2"),), "the old ones stay"
    world.gone("large-2")
    assert world.step() == ()
    world.held.clear()
    assert world.step() == (Start("large", TWO),), "it is tried again"
    world.become("large-2", ReplicaState.SERVING)
    assert world.step() == (End("large-1"), End("large-0"))


def test_where_gpus_do_not_suffice_for_both_one_after_the_other_is_ended_first() -> None:
    world = World(2, {"large": Counter({TWO: 1})}).serve("large", ONE, ONE)
    assert world.step() == (End("large-1"),)
    world.gone("large-1")
    assert world.step() == (End("large-0"),)
    assert world.step() == ()
    world.gone("large-0")
    assert world.step() == (Start("large", TWO),)


def test_a_substitute_that_fails_is_stood_in_for_and_not_tried_at_that_price_for_ever() -> None:
    world = World(2, {"large": Counter({TWO: 1})}).serve("large", TWO)
    world.wanted = {"large": Counter({ONE: 2})}
    prices = 0
    for _ in range(60):
        for step in world.step():
            prices += isinstance(step, End) and world.one(step.name).shape == TWO
        for replica in world.under_way():
            if replica.state is ReplicaState.ENDING:
                world.gone(replica.name)
            elif replica.shape == TWO:
                world.become(replica.name, ReplicaState.SERVING)
            else:
                world.fail(replica.name)
        if world.shapes("large") == [TWO]:
            world.held.clear()
    assert world.shapes("large") == [TWO], "the former shape serves on"
    assert 1 <= prices <= MAX_TRIES
    assert world.step() == ()
    world.failures.clear()  # a new plan
    world.settle()
    assert world.reached()


def test_a_tier_that_is_left_out_lingers_with_one_instance() -> None:
    world = World(2, {"small": Counter({ONE: 2}), "large": Counter()}).serve("small", ONE).serve("large", ONE)
    world.lingering = {"large"}
    assert world.step() == ()
    world.lingering = set()
    assert world.step() == (End("large-0"),)
    world.settle()
    assert (world.shapes("small"), world.shapes("large")) == ([ONE, ONE], [])


def test_a_tier_that_is_left_out_serves_on_until_those_that_are_planned_do() -> None:
    world = World(2, {"small": Counter({ONE: 1}), "large": Counter()}).serve("large", ONE)
    assert world.step() == (Start("small", ONE),)
    world.fail("small-0")
    assert world.step() == (End("small-0"),), "large may be all that answers"
    world.gone("small-0")
    world.settle()
    assert world.reached()
    wanted = {"small": Counter({ONE: 1}), "large": Counter(), "medium": Counter({TWO: 1})}
    world = World(3, wanted).serve("large", ONE)
    world.step()
    assert world.step() == (End("large-0"),), "medium needs its GPU"


def test_others_wait_for_gpus_that_spare_a_tier_its_exchange() -> None:
    wanted = {"small": Counter({ONE: 3}), "large": Counter({TWO: 1}), "medium": Counter({ONE: 1})}
    world = World(6, wanted).serve("small", ONE).serve("large", ONE).serve("medium", ONE, FOUR)
    world.replicas.pop()  # it took 4
    world.replicas.append(Replica("medium-1", "medium", TWO, ReplicaState.SERVING))
    assert world.free == 1
    assert world.step() == (End("medium-1"),), "the free GPU is left for large's substitute"
    world.gone("medium-1")
    assert Start("large", TWO) in world.step()
    world.settle()
    assert world.reached()
    assert not world.exchanged


def test_instances_of_models_without_a_plan_are_left_alone() -> None:
    world = World(4, {"small": Counter({ONE: 1})}).serve("other", ONE).serve("small", ONE)
    assert world.step() == ()


def test_what_can_never_fit_costs_nobody_anything() -> None:
    world = World(2, {"large": Counter({FOUR: 1}), "small": Counter({ONE: 1})}).serve("large", ONE)
    assert world.step() == (Start("small", ONE),)
    world.settle()
    assert (world.shapes("large"), world.shapes("small")) == ([ONE], [ONE])


def test_a_replica_that_starts_for_a_former_plan_is_the_hope_of_a_tier_without_any() -> None:
    world = World(4, {"large": Counter({ONE: 1})})
    world.replicas = [Replica(f"large-{number}", "large", TWO, ReplicaState.STARTING) for number in range(2)]
    assert world.step() == (End("large-1"),)
    world.gone("large-1")
    assert world.step() == (Start("large", ONE),)
    world.become("large-1", ReplicaState.SERVING)
    assert world.step() == (End("large-0"),)


SHAPE = st.sampled_from([ONE, TWO, FOUR, (2, 2)])
DEPLOYMENT = st.dictionaries(st.sampled_from(MODELS), st.lists(SHAPE, max_size=4), min_size=1)


def room(deployment: dict[str, list[Shape]]) -> int:
    return sum(gpus_of(shape) for shapes in deployment.values() for shape in shapes)


@settings(deadline=None)
@given(before=DEPLOYMENT, plans=st.lists(DEPLOYMENT, min_size=1, max_size=3), spare=st.integers(0, 5), data=st.data())
def test_every_plan_that_fits_is_reached_and_no_tier_is_given_up_without_need(
    before: dict[str, list[Shape]], plans: list[dict[str, list[Shape]]], spare: int, data: st.DataObject
) -> None:
    """`World` checks on the way that no GPU is promised twice and that no last instance is ended without need."""
    world = World(spare + max(map(room, [before, *plans])), {})
    for model, shapes in before.items():
        world.serve(model, *shapes)
    for plan in plans:
        world.wanted = {model: Counter(plan.get(model, [])) for model in MODELS}
        world.failures.clear()
        world.unserved.clear()
        world.held.clear()
        world.lingering = set(data.draw(st.sets(st.sampled_from(MODELS))))
        for _ in range(data.draw(st.integers(0, 30))):
            world.step()
            anything_happens(world, data)
    event(f"exchanges: {len(world.exchanged)}")
    world.lingering.clear()
    world.settle()
    assert world.reached()


def anything_happens(world: World, data: st.DataObject) -> None:
    """One process joins, fails for once or is gone; or what failed may be tried again."""
    moving = world.under_way()
    if not moving or (world.held and data.draw(st.booleans())):
        world.held.clear()
        return
    replica = data.draw(st.sampled_from(moving))
    if replica.state is ReplicaState.ENDING:
        world.gone(replica.name)
    elif not world.failures[replica.model, replica.shape] and data.draw(st.integers(0, 3)) == 0:
        world.fail(replica.name)
    else:
        world.become(replica.name, ReplicaState.SERVING)


@given(before=DEPLOYMENT, plan=DEPLOYMENT)
def test_with_room_for_both_no_tier_is_ever_without_an_instance(
    before: dict[str, list[Shape]], plan: dict[str, list[Shape]]
) -> None:
    world = World(room(before) + room(plan), {model: Counter(plan.get(model, [])) for model in MODELS})
    for model, shapes in before.items():
        world.serve(model, *shapes)
    world.settle()
    assert world.reached()
    assert not world.exchanged


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_every_failure_that_passes_is_got_over(fails: int) -> None:
    world = World(2, {"large": Counter({TWO: 1})}).serve("large", ONE, ONE)
    for _ in range(80):
        world.step()
        for replica in world.under_way():
            if replica.state is ReplicaState.ENDING:
                world.gone(replica.name)
            elif world.failures["large", TWO] < fails and replica.shape == TWO:
                world.fail(replica.name)
            else:
                world.become(replica.name, ReplicaState.SERVING)
        if world.serving("large"):
            world.held.clear()
    assert world.reached()


def situation(wanted: dict[str, dict[Shape, int]], *replicas: Replica, free: int, **facts: object) -> Situation:
    return Situation(replicas, wanted, free, gpus_of, **facts)  # type: ignore[arg-type]


def serving(model: str, shape: Shape = ONE) -> Replica:
    return Replica(f"{model}-0", model, shape, ReplicaState.SERVING)


def test_who_has_none_is_given_the_first() -> None:
    now = situation({"small": {ONE: 3}, "large": {ONE: 1}}, serving("small"), free=1)
    assert next_steps(now) == (Start("large", ONE),)


def test_a_tier_with_a_stand_in_gets_nothing_else_at_once() -> None:
    now = situation({"small": {TWO: 1}}, free=4, failed=frozenset({("small", TWO)}), former={"small": ONE})
    assert next_steps(now) == (Start("small", ONE),)


def test_each_tier_that_has_none_is_given_one_before_any_is_given_two() -> None:
    now = situation({"small": {ONE: 2}, "large": {ONE: 2}}, free=2)
    assert next_steps(now) == (Start("small", ONE), Start("large", ONE))
    now = situation({"small": {TWO: 2}, "large": {TWO: 2}}, serving("small"), serving("large"), free=4)
    assert next_steps(now) == (Start("small", TWO), Start("large", TWO)), "nor any two substitutes"


def test_no_more_are_started_than_are_missing() -> None:
    now = situation({"large": {TWO: 2}}, serving("large"), free=8)
    assert next_steps(now) == (Start("large", TWO), Start("large", TWO))


def test_narrow_ones_are_started_first() -> None:
    deep = (1, 4)
    assert next_steps(situation({"small": {deep: 1, TWO: 1}}, free=4)) == (Start("small", TWO),)


def test_substitutes_that_give_back_more_than_they_take_come_first() -> None:
    two_by_two = (2, 2)
    wanted = {"small": {TWO: 1}, "large": {two_by_two: 1}}
    now = situation(wanted, serving("small"), serving("large", FOUR), free=4)
    assert next_steps(now) == (Start("large", two_by_two),), "which gives back as much, and small's takes more"


def test_others_are_started_beside_a_substitute_that_fits() -> None:
    now = situation({"large": {TWO: 1}, "small": {ONE: 2}}, serving("large"), serving("small"), free=3)
    assert next_steps(now) == (Start("large", TWO), Start("small", ONE))


def test_nothing_waits_for_a_substitute_where_not_all_that_is_planned_fits() -> None:
    here = [Replica(f"small-{number}", "small", ONE, ReplicaState.SERVING) for number in range(2)]
    now = situation({"large": {FOUR: 1}, "small": {ONE: 4}}, serving("large"), *here, free=3)
    assert next_steps(now) == (Start("small", ONE), Start("small", ONE))


def test_a_tier_that_serves_in_its_former_shape_needs_no_stand_in() -> None:
    failed = frozenset({("small", TWO)})
    now = situation({"small": {TWO: 1}}, serving("small"), free=4, failed=failed, held=failed, former={"small": ONE})
    assert next_steps(now) == ()


def test_one_is_ended_of_the_tier_that_has_the_most_gpus_the_youngest_first() -> None:
    narrow = [Replica(f"small-{number}", "small", ONE, ReplicaState.SERVING) for number in range(2)]
    wide = [Replica(f"large-{number}", "large", TWO, ReplicaState.SERVING) for number in range(3)]
    now = situation({"small": {FOUR: 1}, "large": {FOUR: 2}}, *narrow, *wide, free=0)
    assert next_steps(now) == (End("large-2"),)


def test_the_last_of_a_tier_is_ended_for_its_own_substitute_only() -> None:
    now = situation({"large": {(8, 1): 1}, "small": {TWO: 1}}, serving("large", TWO), serving("small"), free=1)
    assert next_steps(now) == (End("small-0"),), "although large has more GPUs"


def test_a_tier_gives_up_only_what_leaves_it_as_many_gpus_as_are_wanted() -> None:
    wide = tuple(Replica(f"m-{number}", "m", TWO, ReplicaState.SERVING) for number in range(2))
    assert TierStatus("m", {ONE: 4}, wide).covered(lingers=False) == ()
    narrow = tuple(Replica(f"m-{number}", "m", ONE, ReplicaState.SERVING) for number in range(3))
    assert TierStatus("m", {TWO: 1}, narrow).covered(lingers=False) == narrow[2:]
    assert TierStatus("m", {}, narrow).covered(lingers=True) == (narrow[2], narrow[1])


@pytest.mark.parametrize("lingers", [True, False])
def test_nobody_is_ended_for_a_substitute_while_one_that_is_left_out_is_about_to_go(lingers: bool) -> None:
    now = situation({"old": {}, "new": {TWO: 1}}, serving("old"), serving("new"), free=1)
    now = replace(now, lingering=frozenset({"old"} if lingers else ()))
    assert next_steps(now) == (() if lingers else (End("old-0"),))
