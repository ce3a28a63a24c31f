"""Instances follow scales as they follow plans."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from controlplane.deployment.replicas import with_scales
from controlplane.model.autoscale_record import ScaleRecord
from controlplane.model.replica_kind import KindReplicas
from mesh.store.embedded import EmbeddedStore
from tests.unit.services.cli.machine import DRAIN_S, ONE, TWO, Machine


async def test_a_model_is_scaled_up_down_and_to_zero(store: EmbeddedStore) -> None:
    machine = Machine(4, store, chat=[ONE])
    machine.scale(ScaleRecord("chat", 3, why="load"))
    assert machine.events[-1] == "chat is scaled to 3: load"
    await machine.settle()
    assert machine.serving == {("chat", ONE): 3}
    machine.scale(ScaleRecord("chat", 1, leave_first=("chat-2", "chat-0", "chat-1")))
    await machine.turn()
    assert set(machine.kill_after_s) == {"chat-2", "chat-0"}, "those that were named first"
    assert machine.kill_after_s["chat-0"] > DRAIN_S
    await machine.settle()
    machine.scale(ScaleRecord("chat", 0))
    await machine.settle()
    assert not machine.processes
    machine.scale(ScaleRecord("chat", 1))
    await machine.settle()
    assert machine.serving == {("chat", ONE): 1}


async def test_of_kinds_a_machine_starts_those_of_its_gpus_and_of_any(store: EmbeddedStore) -> None:
    machine = Machine(8, store, gpu_kind="H100", chat=[ONE])
    kinds = (KindReplicas(2), KindReplicas(1, "H100", 2), KindReplicas(3, "A10"))
    machine.scale(ScaleRecord("chat", 6, kinds=kinds).checked())
    await machine.settle()
    assert machine.serving == {("chat", ONE): 2, ("chat", TWO): 1}
    machine.scale(ScaleRecord("chat", 4, kinds=(KindReplicas(2, "H100", 2), KindReplicas(2, "A10"))))
    await machine.turn()
    assert not machine.kill_after_s, "what is to be replaced serves until the other does"
    await machine.settle()
    assert machine.serving == {("chat", TWO): 2}
    assert machine.manager.status is not None
    assert machine.manager.status.gpu_kind == "H100"


async def test_what_does_not_fit_is_said_and_what_is_not_run_here_is_left_to_others(store: EmbeddedStore) -> None:
    machine = Machine(2, store, chat=[ONE])
    machine.scale(ScaleRecord("chat", 3), ScaleRecord("elsewhere", 2))
    for _ in range(3):
        record = await machine.turn()
        for name in machine.starting:
            machine.joins(name)
    assert machine.serving == {("chat", ONE): 2}
    assert [each.why for each in record.missing] == ["the plans want 3 GPUs together, and there are 2 here for them"]


async def test_a_model_that_is_no_longer_scaled_keeps_what_it_has(store: EmbeddedStore) -> None:
    machine = Machine(4, store, chat=[ONE])
    machine.scale(ScaleRecord("chat", 2))
    await machine.settle()
    machine.scale()
    await machine.turn(after_s=100.0)
    assert machine.serving == {("chat", ONE): 2}


@given(
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 9)),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 9)),
)
def test_a_scale_adds_to_a_plan_and_takes_nothing_away(plan: dict[str, int], scales: dict[str, int]) -> None:
    planned = {model: Counter({TWO: count}) for model, count in plan.items()}
    wanted = with_scales(planned, scales, dict.fromkeys("abc", ONE))
    for model in plan.keys() | scales.keys():
        assert wanted[model].total() == max(plan.get(model, 0), scales.get(model, 0))
        assert wanted[model][TWO] == plan.get(model, 0)
