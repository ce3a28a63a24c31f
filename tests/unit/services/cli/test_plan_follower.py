"""Instances as planned, on as many GPUs as there are."""

import asyncio
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.planning.cascade.plan import CascadePlan, PlannedReplicas, PlannedTier
from mesh.membership import Directory
from mesh.store.embedded import EmbeddedStore
from mesh.store.host import StoreHost
from services.cli.supervisor.gpus import GpuPool
from services.cli.supervisor.plan_follower import PlanFollower
from services.cli.supervisor.replicas import Shape
from services.cli.supervisor.supervisor import ProcessSpec, Supervisor

Instances = dict[str, dict[str, Shape]]
"""By model."""
SHAPES = st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2), (3, 1)])


class Machine:
    """Starts and ends at once what the supervisor would, on so many GPUs; both the supervisor and the directory."""

    def __init__(self, gpus: int, running: Instances) -> None:
        self.pool = GpuPool(gpus)
        self.running = running
        self.events: list[str] = []
        self.unserved: set[str] = set()
        """Models that had no instance at some time."""
        self._names = {name for of_model in running.values() for name in of_model}
        for of_model in running.values():
            for name, (tp, pp) in of_model.items():
                self.pool.take(name, tp * pp)

    async def add(self, spec: ProcessSpec) -> None:
        self._names.add(spec.name)

    async def remove(self, name: str, _kill_after_s: float) -> None:
        self._names.remove(name)
        model = name.rpartition("-")[0]
        if not any(other.startswith(f"{model}-") for other in self._names):
            self.unserved.add(model)

    def names(self) -> frozenset[str]:
        return frozenset(self._names)

    def subscribe(self, heard: Callable[[Any], None]) -> Callable[[], None]:
        for name in self._names:
            heard(SimpleNamespace(member=SimpleNamespace(member_id=name)))
        return lambda: None

    def spec(self, _model: str, name: str, shape: Shape) -> ProcessSpec:
        return ProcessSpec(name, "worker", (), self.pool.take(name, shape[0] * shape[1]))

    def reach(self, wanted: dict[str, Counter[Shape]]) -> None:
        """Follow a plan for so many instances of each model and shape."""
        tiers = tuple(
            PlannedTier(model, 99, tuple(PlannedReplicas(n, *shape) for shape, n in shapes.items()), 0.0, 1.0)
            for model, shapes in wanted.items()
        )
        plan = CascadePlan("both", tiers, (50.0,) * (len(tiers) - 1), 1.0, 1.0, 1.0, 999)
        host = StoreHost()
        follower = PlanFollower(
            EmbeddedStore(host),
            cast(Directory, self),
            cast(Supervisor, self),
            self.spec,
            self.running,
            on_event=self.events.append,
            on_ended=self.pool.give_back,
            has_room=lambda shape, ended: self.pool.has_room(shape[0] * shape[1], ended),
        )
        asyncio.run(asyncio.wait_for(follower.reach(plan), 20))
        host.close()

    def shapes(self) -> dict[str, Counter[Shape]]:
        """What runs."""
        return {model: Counter(of_model.values()) for model, of_model in self.running.items()}


def gpus_of(shapes: Counter[Shape]) -> int:
    return sum(tp * pp * count for (tp, pp), count in shapes.items())


def instances(wanted: dict[str, Counter[Shape]]) -> Instances:
    return {
        model: {f"{model}-{number}": shape for number, shape in enumerate(shapes.elements())}
        for model, shapes in wanted.items()
    }


def test_narrow_instances_make_room_for_a_wide_one() -> None:
    machine = Machine(4, instances({"a": Counter({(1, 1): 4})}))
    machine.reach({"a": Counter({(4, 1): 1})})
    assert machine.shapes() == {"a": Counter({(4, 1): 1})}
    assert not machine.pool.has_room(1)
    assert machine.events == [
        "plan of both: a gets 1 new instances and loses 4",
        "nobody serves a until a-4 does: there are no GPUs for old and new at once",
    ]


def test_where_there_is_room_the_old_instance_serves_until_the_new_one_does() -> None:
    machine = Machine(6, instances({"a": Counter({(2, 1): 1})}))
    machine.reach({"a": Counter({(4, 1): 1})})
    assert machine.shapes() == {"a": Counter({(4, 1): 1})}
    assert not machine.unserved


def test_a_tier_that_grows_waits_for_one_that_shrinks() -> None:
    machine = Machine(4, instances({"a": Counter({(1, 1): 1}), "b": Counter({(1, 1): 3})}))
    machine.reach({"a": Counter({(1, 1): 3}), "b": Counter({(1, 1): 1})})
    assert machine.shapes() == {"a": Counter({(1, 1): 3}), "b": Counter({(1, 1): 1})}
    assert not machine.unserved


def test_what_runs_goes_on_where_this_machine_is_too_small_for_what_is_planned() -> None:
    machine = Machine(2, instances({"a": Counter({(2, 1): 1})}))
    machine.reach({"a": Counter({(4, 1): 1})})
    assert machine.shapes() == {"a": Counter({(2, 1): 1})}
    assert "a-1 needs 4 of this machine's 2 GPUs" in machine.events[-1]


@given(
    before=st.lists(st.tuples(st.sampled_from("abc"), SHAPES), max_size=6),
    after=st.lists(st.tuples(st.sampled_from("abc"), SHAPES), max_size=6),
    spare=st.integers(0, 3),
)
@settings(max_examples=150, deadline=None)
def test_every_plan_that_fits_is_reached(
    before: list[tuple[str, Shape]], after: list[tuple[str, Shape]], spare: int
) -> None:
    def by_model(pairs: list[tuple[str, Shape]]) -> dict[str, Counter[Shape]]:
        return {model: Counter(shape for of, shape in pairs if of == model) for model in "abc"}

    old, new = by_model(before), by_model(after)
    gpus = max(1, *(sum(map(gpus_of, shapes.values())) for shapes in (old, new))) + spare
    machine = Machine(gpus, instances(old))
    machine.reach(new)
    assert machine.shapes() == new
    assert not [event for event in machine.events if "cannot be started" in event]
    kept = {model for model in "abc" if (old[model] & new[model])}
    assert not machine.unserved & kept
