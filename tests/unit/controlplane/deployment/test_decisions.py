"""What the manager does and says about each event, and what it publishes of the way to the plan."""

from collections.abc import Mapping

import pytest

from controlplane.deployment.deployment_status import (
    DRAINED,
    STARTING,
    DeploymentStatus,
    MissingReplicas,
    deployment_status,
)
from controlplane.deployment.failed_starts import FailedStarts, Failure
from controlplane.deployment.gpus import CPU_PLACES, GpuPool
from controlplane.deployment.manager import (
    LINGER_S,
    DeploymentEvent,
    DeploymentInstruction,
    DeploymentManager,
    Ended,
    EndInstance,
    Looked,
    Publish,
    RecordsChanged,
    Say,
    Started,
    StartFailed,
    StartInstance,
    StepsTaken,
)
from controlplane.deployment.replicas import Replica, ReplicaState, Shape, gpus_of
from controlplane.deployment.steps import Situation
from controlplane.model.cascade_record import CascadeRecord
from tests.unit.services.cli.machine import ONE, READY_S, TWO, planned

WIDE = (2, 2)


class OfMachine:
    """A manager with as many GPUs; processes run once they are started."""

    def __init__(self, gpus: int, **running: Mapping[str, Shape]) -> None:
        self.now_s = 0.0
        pool = GpuPool(gpus)
        for shapes in running.values():
            for name, shape in shapes.items():
                pool.take(name, gpus_of(shape))
        self.manager = DeploymentManager("here", pool, READY_S, running)
        self.names = {name for shapes in running.values() for name in shapes}
        self.joined: dict[str, str] = {}
        self.given_up: dict[str, str] = {}

    def tell(self, event: DeploymentEvent) -> tuple[DeploymentInstruction, ...]:
        told = self.manager.handle(event, self.now_s)
        self.manager.validate()
        self.names |= {each.name for each in told if isinstance(each, StartInstance)}
        return told

    def plan(self, revision: int = 3, cascade: str = "both", **tiers: dict[Shape, int]) -> tuple[str, ...]:
        """What is said of it."""
        plan = planned(cascade, **tiers)
        record = CascadeRecord(cascade, tuple(tiers), plan.thresholds, plan_revision=revision)
        return said(self.tell(RecordsChanged({cascade: plan}, {cascade: record})))

    def look(self, after_s: float = 1.0) -> tuple[DeploymentInstruction, ...]:
        self.now_s += after_s
        return self.tell(Looked(frozenset(self.names), dict(self.given_up), dict(self.joined)))

    def status(self) -> DeploymentStatus:
        (published,) = [each for each in self.tell(StepsTaken()) if isinstance(each, Publish)]
        assert published.status == self.manager.status
        return published.status


def said(instructions: tuple[DeploymentInstruction, ...]) -> tuple[str, ...]:
    return tuple(each.line for each in instructions if isinstance(each, Say))


def test_an_instance_is_started_told_of_and_reached() -> None:
    here = OfMachine(2)
    assert not here.manager.follows_plans
    assert here.manager.status is None
    assert here.plan(small={ONE: 1}) == ("the plan for both, revision 3, is followed",)
    assert here.manager.follows_plans
    assert here.plan(small={ONE: 1}) == (), "nothing new"
    assert here.look() == (StartInstance("small-0", "small", ONE, {"CUDA_VISIBLE_DEVICES": "0"}),)
    assert here.tell(Started("small-0")) == (Say("small-0 is started as planned, TP=1"),)
    missing = (MissingReplicas("small", 1, 1, 1, STARTING),)
    assert here.tell(StepsTaken()) == (Publish(DeploymentStatus("here", {"both": 3}, missing)),)
    assert here.tell(StepsTaken()) == (), "it was said"
    here.joined["small-0"] = "1"
    assert here.look() == ()
    assert here.manager.replicas == (Replica("small-0", "small", ONE, ReplicaState.SERVING),)
    reached = DeploymentStatus("here", {"both": 3})
    assert reached.is_reached
    assert reached.key == "/penstock/deployments/here"
    assert here.tell(StepsTaken()) == (Publish(reached), Say("all instances run as planned"))


def test_one_that_does_not_join_in_time_is_ended_and_tried_again_after_a_pause() -> None:
    here = OfMachine(2)
    here.plan(small={WIDE: 1}, large={ONE: 1})
    assert here.look() == (StartInstance("large-0", "large", ONE, {"CUDA_VISIBLE_DEVICES": "0"}),)
    here.tell(Started("large-0"))
    assert here.look(READY_S - 1) == ()
    why = "large-0 was not in the mesh for 300 s; see its log"
    assert here.look(1) == (
        Say(f"{why}; it is tried again in 5 s at the earliest"),
        Say("large-0 is drained and ended"),
        EndInstance("large-0", drains=False),
    )
    told = here.tell(StepsTaken())
    room = "the plans want 5 GPUs together, and there are 2 here for them"
    missing = (
        MissingReplicas("small", 1, 2, 2, room),
        MissingReplicas("large", 1, 1, 1, f"{why}; it is tried again"),
    )
    assert told == (
        Publish(DeploymentStatus("here", {"both": 3}, missing, ("large-0",))),
        Say(f"NOT as planned: small lacks 1 (TP=2, PP=2): {room}"),
        Say(f"NOT as planned: large lacks 1 (TP=1): {why}; it is tried again"),
    )
    here.names.discard("large-0")
    assert here.tell(Ended("large-0")) == ()
    assert here.look(3.9) == (), "the pause is not over"
    assert [type(each) for each in here.look(1.1)] == [StartInstance]
    assert said(here.tell(StepsTaken())) == (), "each line is said once for as long as it holds"


def test_the_time_to_join_counts_from_the_last_time_it_was_there() -> None:
    here = OfMachine(1, small={"small-0": ONE})
    here.plan(small={ONE: 1})
    here.joined["small-0"] = "1"
    here.look(1000.0)
    del here.joined["small-0"]
    assert here.look(10.0) == ()
    assert here.manager.replicas[0].state is ReplicaState.STARTING
    assert here.look(READY_S - 1) == ()
    assert said(here.look(1.0))[0].startswith("small-0 was not in the mesh for 300 s")


def test_pauses_double_while_starts_fail_and_those_that_fail_together_count_once() -> None:
    here = OfMachine(2)
    here.plan(small={ONE: 2})
    pauses = []
    for pause_s in (5, 10, 20):
        for start in here.look(pause_s):
            assert isinstance(start, StartInstance)
            (line,) = said(here.tell(StartFailed(start.name, "no such model")))
            pauses.append(line)
    again = [f"no such model; it is tried again in {pause_s} s at the earliest" for pause_s in (5, 10, 20)]
    assert pauses == [line for line in again for _ in range(2)]
    assert here.status().missing == (MissingReplicas("small", 2, 1, 1, "no such model; it is tried again"),)
    here.plan(4, small={ONE: 1})
    assert [type(each) for each in here.look(0.0)] == [StartInstance], "another plan is tried afresh"


def test_one_that_was_given_up_is_replaced() -> None:
    here = OfMachine(2, small={"small-0": ONE})
    here.joined["small-0"] = "1"
    here.plan(small={ONE: 1})
    here.look()
    here.given_up["small-0"] = "it ended 8 times in 120 s"
    told = here.look()
    why = "small-0 was given up: it ended 8 times in 120 s"
    assert told == (
        Say(f"{why}; it is tried again in 5 s at the earliest"),
        Say("small-0 is drained and ended"),
        EndInstance("small-0", drains=False),
    )


def test_what_an_operator_has_drained_stays_away_until_another_plan() -> None:
    here = OfMachine(2, small={"small-0": ONE, "small-1": ONE})
    here.joined |= {"small-0": "1", "small-1": "2"}
    here.plan(small={ONE: 2})
    here.look()
    here.names.discard("small-1")
    assert here.look() == ()
    assert here.status() == DeploymentStatus("here", {"both": 3}, (MissingReplicas("small", 1, 1, 1, DRAINED),))
    assert here.look(1000.0) == ()
    assert here.plan(4, small={ONE: 2}) == ("the plan for both, revision 4, is followed",)
    assert [type(each) for each in here.look()] == [StartInstance]


def test_a_tier_that_a_plan_leaves_out_keeps_one_for_a_while() -> None:
    here = OfMachine(3, small={"small-0": ONE, "small-1": ONE}, large={"large-0": ONE})
    here.joined |= {"small-0": "1", "small-1": "2", "large-0": "3"}
    here.plan(small={ONE: 2}, large={ONE: 1})
    here.look()
    here.plan(4, small={}, large={ONE: 1})
    assert here.look(0.0) == (Say("small-1 is drained and ended"), EndInstance("small-1", drains=True))
    assert here.status().leaving == ("small-0", "small-1")
    here.names.discard("small-1")
    here.tell(Ended("small-1"))
    assert here.look(LINGER_S - 1) == ()
    assert here.look(1.0) == (Say("small-0 is drained and ended"), EndInstance("small-0", drains=True))


def test_the_while_is_neither_longer_for_another_plan_nor_in_the_way_of_one_that_wants_the_tier_again() -> None:
    here = OfMachine(2, small={"small-0": ONE})
    here.joined["small-0"] = "1"
    here.plan(small={ONE: 1})
    here.look()
    here.plan(4, small={})
    here.look(30.0)
    here.plan(5, small={}, large={})
    ends = (Say("small-0 is drained and ended"), EndInstance("small-0", drains=True))
    assert here.look(LINGER_S - 31) == ()
    assert here.look(1.0) == ends

    again = OfMachine(2, small={"small-0": ONE})
    again.joined["small-0"] = "1"
    again.plan(small={ONE: 1})
    again.look()
    again.plan(4, small={})
    again.look()
    again.plan(5, small={TWO: 1})
    assert again.look() == ends, "it makes room for the one that is wanted"


def test_one_too_many_that_goes_by_itself_takes_nothing_from_the_plan() -> None:
    here = OfMachine(2, small={"small-0": ONE, "small-1": ONE})
    here.joined["small-0"] = "1"
    here.plan(small={ONE: 1})
    here.names.discard("small-1")
    assert here.look() == ()
    assert here.status() == DeploymentStatus("here", {"both": 3})


def test_a_plan_that_is_taken_away_leaves_the_instances_alone() -> None:
    here = OfMachine(1, small={"small-0": ONE})
    here.plan(small={ONE: 1})
    assert here.tell(RecordsChanged({}, {})) == (Say("no plan for both is followed any more"),)
    assert not here.manager.follows_plans
    assert here.look(1000.0) == ()
    assert here.status() == DeploymentStatus("here", {})


def test_a_plan_counts_with_its_cascade_whichever_is_heard_of_first() -> None:
    here = OfMachine(2)
    plan = planned("both", small={ONE: 1}, large={ONE: 1})
    other = CascadeRecord("both", ("small",), (), plan_revision=1)
    earlier = CascadeRecord("both", ("small", "large"), (10.0,), plan_revision=1)
    fitting = CascadeRecord("both", ("small", "large"), plan.thresholds, plan_revision=2)
    by_hand = CascadeRecord("both", ("small", "large"), (10.0,))
    assert here.tell(RecordsChanged({"both": plan}, {})) == ()
    assert here.tell(RecordsChanged({"both": plan}, {"both": other})) == ()
    assert here.tell(RecordsChanged({"both": plan}, {"both": earlier})) == (), "its own plan is not heard of yet"
    followed = here.tell(RecordsChanged({"both": plan}, {"both": fitting}))
    assert followed == (Say("the plan for both, revision 2, is followed"),)
    newer = planned("both", small={ONE: 2}, large={ONE: 1})
    assert here.tell(RecordsChanged({"both": newer}, {"both": earlier})) == ()
    assert here.status().plans == {"both": 2}, "the former one holds until both are heard of"
    assert here.tell(RecordsChanged({"both": plan}, {"both": by_hand})) == (), "thresholds say nothing of instances"
    assert here.tell(StepsTaken()) == (), "and the plan keeps its revision"
    assert here.tell(RecordsChanged({"alone": plan, "both": plan}, {"both": by_hand})) == (), "alone has no cascade"
    assert here.tell(RecordsChanged({"both": plan}, {"both": other})) == (Say("no plan for both is followed any more"),)


def test_a_former_incarnation_is_no_sign_of_life() -> None:
    here = OfMachine(1)
    here.plan(small={ONE: 1})
    here.joined["small-0"] = "of before"
    here.look()
    here.look()
    assert here.manager.replicas[0].state is ReplicaState.STARTING
    here.joined["small-0"] = "new"
    here.look()
    assert here.manager.replicas[0].state is ReplicaState.SERVING


def test_a_stand_in_is_said_to_be_one() -> None:
    here = OfMachine(2, small={"small-0": ONE})
    here.joined["small-0"] = "1"
    here.plan(small={ONE: 1})
    here.look()
    here.plan(4, small={TWO: 1})
    (_, end) = here.look()
    assert end == EndInstance("small-0", drains=True)
    here.names.discard("small-0")
    here.tell(Ended("small-0"))
    (start,) = here.look()
    assert isinstance(start, StartInstance)
    here.tell(StartFailed(start.name, "too wide"))
    here.names.discard(start.name)
    (stand_in,) = here.look()
    assert isinstance(stand_in, StartInstance)
    assert stand_in.shape == ONE
    assert here.tell(Started(stand_in.name)) == (Say(f"{stand_in.name} is started until one as planned can be, TP=1"),)


def test_without_gpus_instances_take_places() -> None:
    here = OfMachine(0)
    here.plan(small={TWO: CPU_PLACES + 1})
    starts = here.look()
    assert {type(each) for each in starts} == {StartInstance}
    assert len(starts) == CPU_PLACES
    room = f"the plans want {CPU_PLACES + 1} places on the CPU together, and there are {CPU_PLACES} here for them"
    assert here.status().missing[-1] == MissingReplicas("small", 1, 2, 1, room)


def test_what_waits_for_others_to_make_room_says_for_how_much() -> None:
    here = OfMachine(3, small={"small-0": ONE, "small-1": ONE})
    here.joined |= {"small-0": "1", "small-1": "2"}
    here.plan(small={ONE: 1}, large={TWO: 1})
    here.look()
    missing = (MissingReplicas("large", 1, 2, 1, "it waits for GPUs: 2 needed, 1 free"),)
    assert here.status() == DeploymentStatus("here", {"both": 3}, missing, ("small-1",))


def test_what_fits_and_is_not_begun_waits_for_its_turn() -> None:
    now = Situation((), {"small": {ONE: 2}}, 1, gpus_of)
    missing = (MissingReplicas("small", 2, 1, 1, "it waits for its turn"),)
    assert deployment_status("here", {}, now, {}, {}, "GPUs", {}) == DeploymentStatus("here", {}, missing)


@pytest.mark.parametrize("free", [0, 1])
def test_what_has_failed_too_often_is_tried_again_where_it_fits_beside_the_others(free: int) -> None:
    key = ("small", ONE)
    failures = {key: Failure(3, 0.0, "no such model")}
    now = Situation((), {"small": {ONE: 1}}, free, gpus_of, spent=frozenset({key}))
    (missing,) = deployment_status("here", {}, now, failures, {}, "GPUs", {}).missing
    assert ("it is tried again" in missing.why) == (free == 1)


def test_a_failure_counts_anew_when_the_pause_is_over() -> None:
    failed = FailedStarts()
    first = failed.note(("small", ONE), "no such model", 10.0)
    assert failed.note(("small", ONE), "no such file", first.again_s - 0.1) == first
    assert failed.note(("small", ONE), "no such file", first.again_s) == Failure(2, first.again_s, "no such file")


def of_two_plans() -> OfMachine:
    """One cascade's plan has failed with the wide replica; and an operator has drained one of two of the other's."""
    here = OfMachine(5, large={"large-0": ONE, "large-1": ONE})
    here.joined |= {"large-0": "1", "large-1": "2"}
    plans = {"one": planned("one", small={TWO: 1}), "two": planned("two", large={ONE: 2})}
    cascades = {
        name: CascadeRecord(name, tuple(tier.model for tier in plan.tiers), plan.thresholds, plan_revision=1)
        for name, plan in plans.items()
    }
    here.tell(RecordsChanged(plans, cascades))
    (start,) = here.look()
    assert start == StartInstance("small-0", "small", TWO, {"CUDA_VISIBLE_DEVICES": "2,3"})
    here.tell(StartFailed("small-0", "no such model"))
    here.names -= {"small-0", "large-1"}
    assert here.look() == ()
    return here


@pytest.mark.parametrize("changed", ["one", "two", "none"])
def test_another_plan_forgets_failures_and_drains_of_its_own_models_only(changed: str) -> None:
    here = of_two_plans()
    plans = {"one": planned("one", small={TWO: 1}), "two": planned("two", large={ONE: 2})}
    cascades = {
        name: CascadeRecord(
            name, tuple(tier.model for tier in plan.tiers), plan.thresholds, plan_revision=1 + (name == changed)
        )
        for name, plan in plans.items()
    }
    here.tell(RecordsChanged(plans, cascades))
    started = [each.model for each in here.look() if isinstance(each, StartInstance)]
    assert started == {"one": ["small"], "two": ["large"], "none": []}[changed]


def test_all_that_operators_have_drained_is_counted() -> None:
    here = OfMachine(2, small={"small-0": ONE, "small-1": ONE})
    here.joined |= {"small-0": "1", "small-1": "2"}
    here.plan(small={ONE: 2})
    here.look()
    here.names.clear()
    assert here.look() == ()
    assert here.status().missing == (MissingReplicas("small", 2, 1, 1, DRAINED),)


def test_a_tier_that_the_first_plan_leaves_out_lingers_too() -> None:
    here = OfMachine(1, large={"large-0": ONE})
    here.joined["large-0"] = "1"
    here.plan(large={})
    assert here.look(0.0) == ()
    assert here.look(LINGER_S - 1) == ()
    assert [type(each) for each in here.look(1.0)] == [Say, EndInstance]


def test_one_that_was_started_for_a_plan_that_is_gone_stands_in() -> None:
    here = OfMachine(1)
    here.plan(small={ONE: 1})
    here.look()
    here.tell(RecordsChanged({}, {}))
    assert here.tell(Started("small-0")) == (Say("small-0 is started until one as planned can be, TP=1"),)


def test_others_are_looked_at_while_one_ends() -> None:
    here = OfMachine(4, small={"small-0": ONE})
    here.joined["small-0"] = "1"
    here.plan(small={TWO: 1})
    here.look()
    here.joined["small-1"] = "2"
    assert here.look() == (Say("small-0 is drained and ended"), EndInstance("small-0", drains=True))
    del here.joined["small-1"]
    here.look()
    assert [each.state for each in here.manager.replicas] == [ReplicaState.ENDING, ReplicaState.STARTING]


def stood_in() -> OfMachine:
    """The substitute has failed, and its tier's former shape is started for it."""
    here = OfMachine(2, small={"small-0": ONE})
    here.joined["small-0"] = "1"
    here.plan(small={ONE: 1})
    here.look()
    here.plan(4, small={TWO: 1})
    here.look()
    here.names.discard("small-0")
    del here.joined["small-0"]
    here.tell(Ended("small-0"))
    (start,) = here.look()
    assert isinstance(start, StartInstance)
    here.tell(StartFailed(start.name, "too wide"))
    here.names.discard(start.name)
    return here


def shapes_started(instructions: tuple[DeploymentInstruction, ...]) -> list[Shape]:
    return [each.shape for each in instructions if isinstance(each, StartInstance)]


def test_another_plan_tries_what_was_planned_before_it_has_anything_stand_in() -> None:
    here = stood_in()
    here.plan(5, small={TWO: 1})
    assert shapes_started(here.look()) == [TWO]


def test_once_a_stand_in_has_served_the_tier_what_is_planned_is_hoped_for_again() -> None:
    here = stood_in()
    assert shapes_started(here.look()) == [ONE]
    here.joined["small-0"] = "3"
    here.look()
    here.names.discard("small-0")
    assert shapes_started(here.look()) == [], "what is planned may be tried in a moment"
    assert shapes_started(here.look(5.0)) == [TWO]


def test_a_pool_without_gpus_runs_out_of_places() -> None:
    pool = GpuPool(0, cpu_places=2)
    assert (pool.free, pool.unit, pool.room_of(TWO)) == (2, "places on the CPU", 1)
    assert pool.take("a", 2) == {}
    pool.take("b", 1)
    pool.take("c", 1)
    assert pool.free == 0
    pool.give_back("a")
    pool.give_back("a")
    assert (pool.free, pool.holders) == (0, {"b", "c"})
    pool.give_back("b")
    assert pool.free == 1
    gpus = GpuPool(4)
    assert (gpus.free, gpus.unit, gpus.room_of(WIDE)) == (4, "GPUs", 4)
    gpus.take("a", 3)
    assert gpus.free == 1


@pytest.mark.parametrize("times", [2, 3])
def test_a_serving_instance_is_ended_for_one_that_fails_only_so_often(times: int) -> None:
    here = OfMachine(2, small={"small-0": ONE, "small-1": ONE})
    here.joined |= {"small-0": "1", "small-1": "2"}
    here.plan(small={ONE: 2})
    here.look()
    here.plan(4, small={TWO: 1})
    for _ in range(times):
        here.manager._plans.failed.note(("small", TWO), "too wide", here.now_s)
        here.now_s += 1000.0
    may_be_ended = any(isinstance(each, EndInstance) for each in here.look())
    assert may_be_ended == (times < 3)
    (missing,) = here.status().missing
    spent = "too wide; nothing makes room for it once more: apply another plan, or this one again"
    assert missing.why == ("too wide; it is tried again" if times < 3 else spent)
