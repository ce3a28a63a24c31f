"""The manager alone: the same events give the same instructions as to its shell, and its state makes sense."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from controlplane.deployment.gpus import GpuPool
from controlplane.deployment.manager import (
    DeploymentEvent,
    DeploymentInstruction,
    DeploymentManager,
    Ended,
    EndInstance,
    Looked,
    Publish,
    RecordsChanged,
    Started,
    StartFailed,
    StartInstance,
    StepsTaken,
)
from controlplane.deployment.replicas import ReplicaState, Shape, gpus_of
from controlplane.model.cascade_record import CascadeRecord
from controlplane.planning.cascade.plan import CascadePlan
from mesh.runtime import SystemClock, SystemEntropy
from mesh.store.embedded import EmbeddedStore
from mesh.store.host import StoreHost
from tests.unit.services.cli.machine import ONE, READY_S, TWO, Machine, planned

GPUS = 4


async def test_the_live_shell_and_a_replay_of_its_events_get_equal_instructions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = EmbeddedStore(StoreHost(SystemClock(), SystemEntropy()))
    log: list[tuple[DeploymentEvent, float, tuple[DeploymentInstruction, ...]]] = []
    handle = DeploymentManager.handle

    def recorded(self: DeploymentManager, event: DeploymentEvent, now_s: float) -> tuple[DeploymentInstruction, ...]:
        instructions = handle(self, event, now_s)
        log.append((event, now_s, instructions))
        return instructions

    monkeypatch.setattr(DeploymentManager, "handle", recorded)
    machine = Machine(GPUS, store, small=[ONE], large=[ONE, ONE])
    machine.plan(planned("both", small={ONE: 2}, large={TWO: 1}))
    await machine.turn()
    machine.keeps_ending("small-0")
    machine.broken = {"large"}
    for _ in range(8):
        await machine.turn(after_s=100.0)
        for name in list(machine.kill_after_s):
            await machine.ends(name)
    machine.broken = set()
    machine.plan(planned("both", small={ONE: 2}, large={TWO: 1}))
    await machine.settle()
    machine.drains_by_itself("small-1")
    await machine.turn()
    monkeypatch.undo()

    gpus = GpuPool(GPUS)
    running: dict[str, Mapping[str, Shape]] = {"small": {"small-0": ONE}, "large": {"large-0": ONE, "large-1": ONE}}
    for shapes in running.values():
        for name, shape in shapes.items():
            gpus.take(name, gpus_of(shape))
    again = DeploymentManager("here", gpus, READY_S, running)
    for event, now_s, instructions in log:
        assert again.handle(event, now_s) == instructions
        again.validate()
    kinds = Counter(type(event) for event, _, _ in log)
    assert min(kinds[kind] for kind in (RecordsChanged, Looked, Started, StartFailed, Ended, StepsTaken)) > 0


class AnyOrder(RuleBasedStateMachine):
    """Plans, processes and lookers in any order; nothing holds a GPU twice, and what is ended stays ended."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.gpus = GpuPool(GPUS)
        self.manager = DeploymentManager("here", self.gpus, READY_S, {})
        self.names: set[str] = set()
        self.joined: dict[str, str] = {}
        self.given_up: dict[str, str] = {}
        self.ending: set[str] = set()
        self.incarnations = 0

    def handle(self, event: DeploymentEvent, fails: bool = False) -> None:
        for each in self.manager.handle(event, self.now_s):
            match each:
                case StartInstance(name):
                    assert name not in self.names, "its name is free"
                    if fails:
                        self.handle(StartFailed(name, "no such model"))
                    else:
                        self.names.add(name)
                        self.handle(Started(name))
                case EndInstance(name):
                    assert name in self.names - self.ending, "it runs, and is ended once"
                    self.ending.add(name)
                case Publish(status):
                    assert status == self.manager.status

    @rule(
        small=st.dictionaries(st.sampled_from([ONE, TWO]), st.integers(1, 2), max_size=2),
        large=st.dictionaries(st.sampled_from([ONE, TWO]), st.integers(1, 2), max_size=2),
        revision=st.integers(0, 3),
    )
    def plan(self, small: dict[Shape, int], large: dict[Shape, int], revision: int) -> None:
        plan: CascadePlan = planned("both", small=small, large=large)
        cascade: Any = CascadeRecord("both", ("small", "large"), plan.thresholds, plan_revision=revision)
        self.handle(RecordsChanged({"both": plan}, {"both": cascade}))

    @rule()
    def no_plan(self) -> None:
        self.handle(RecordsChanged({}, {}))

    @rule(fails=st.booleans(), after_s=st.sampled_from([0.5, 20.0, 400.0]))
    def turn(self, fails: bool, after_s: float) -> None:
        self.now_s += after_s
        self.handle(Looked(frozenset(self.names), dict(self.given_up), dict(self.joined)), fails)
        self.handle(StepsTaken())

    @precondition(lambda self: self.names - self.ending)
    @rule(data=st.data(), what=st.sampled_from(["joins", "given up", "drained"]))
    def happens(self, data: st.DataObject, what: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.names - self.ending)))
        self.incarnations += 1
        if what == "joins" and name not in self.given_up:
            self.joined[name] = str(self.incarnations)
        elif what == "given up":
            self.given_up[name] = "it kept ending"
            self.joined.pop(name, None)
        elif what == "drained":
            self.gone(name)

    @precondition(lambda self: self.ending)
    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.ending)))
        self.gone(name)
        self.ending.discard(name)
        self.handle(Ended(name))

    def gone(self, name: str) -> None:
        self.names.discard(name)
        self.joined.pop(name, None)
        self.given_up.pop(name, None)

    @invariant()
    def makes_sense(self) -> None:
        self.manager.validate()
        ending = {each.name for each in self.manager.replicas if each.state is ReplicaState.ENDING}
        assert ending == self.ending


TestAnyOrder = AnyOrder.TestCase
