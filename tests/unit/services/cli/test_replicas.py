"""From the instances that run to those that are planned; and which GPUs they get."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.planning.cascade.plan import PlannedReplicas, PlannedTier
from mesh.errors import ConfigurationError
from services.cli.supervisor.gpus import GpuPool
from services.cli.supervisor.replicas import change_of, shape_of, shaped

SHAPES = st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2)])


def tier(*replicas: tuple[int, int, int]) -> PlannedTier:
    return PlannedTier("m", 99, tuple(PlannedReplicas(count, tp, pp) for count, tp, pp in replicas), 1.0, 1.0)


def test_nothing_changes_where_what_runs_is_planned() -> None:
    change = change_of(tier((2, 1, 1)), {"m-0": (1, 1), "m-1": (1, 1)})
    assert (change.start, change.end) == ((), ())


def test_instances_are_added_and_the_last_are_ended() -> None:
    assert change_of(tier((3, 1, 1)), {"m-0": (1, 1)}).start == (("m-1", (1, 1)), ("m-2", (1, 1)))
    assert change_of(tier((1, 1, 1)), {"m-0": (1, 1), "m-1": (1, 1), "m-2": (1, 1)}).end == ("m-1", "m-2")
    assert change_of(tier(), {"m-0": (1, 1)}).end == ("m-0",)


def test_another_shape_is_started_first_where_nobody_else_would_serve() -> None:
    change = change_of(tier((1, 2, 1)), {"m-0": (1, 1)})
    assert (change.start, change.end, change.starts_first) == ((("m-1", (2, 1)),), ("m-0",), True)
    assert not change_of(tier((1, 2, 1), (1, 1, 1)), {"m-0": (1, 1), "m-1": (1, 1)}).starts_first


@given(
    running=st.lists(SHAPES, max_size=6),
    planned=st.lists(st.tuples(st.integers(1, 3), SHAPES), max_size=4, unique=True),
)
def test_after_the_change_exactly_what_is_planned_runs(
    running: list[tuple[int, int]], planned: list[tuple[int, tuple[int, int]]]
) -> None:
    wanted: Counter[tuple[int, int]] = Counter()
    for count, shape in planned:
        wanted[shape] = count
    replicas = tier(*((count, *shape) for shape, count in wanted.items()))
    now = {f"m-{number}": shape for number, shape in enumerate(running)}
    change = change_of(replicas, now)
    after = {name: shape for name, shape in now.items() if name not in change.end} | dict(change.start)
    assert Counter(after.values()) == wanted
    assert not {name for name, _ in change.start} & set(now)
    assert change_of(replicas, after).start == ()


def test_shapes_are_read_from_and_written_into_engine_settings() -> None:
    assert shape_of(("dtype=float32",)) == (1, 1)
    assert shape_of(("tensor_parallel=4", "pipeline_parallel=2")) == (4, 2)
    assert shaped(("dtype=float32", "tensor_parallel=4"), (2, 3)) == (
        "dtype=float32",
        "tensor_parallel=2",
        "pipeline_parallel=3",
    )


def test_instances_get_gpus_of_their_own_and_give_them_back() -> None:
    pool = GpuPool(4)
    assert pool.take("a", 2) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert pool.take("b", 1) == {"CUDA_VISIBLE_DEVICES": "2"}
    with pytest.raises(ConfigurationError, match="c needs 2 of this machine's 4 GPUs, of which 1 are free"):
        pool.take("c", 2)
    pool.give_back("a")
    pool.give_back("a")
    assert pool.take("c", 3) == {"CUDA_VISIBLE_DEVICES": "0,1,3"}


def test_a_machine_without_gpus_runs_on_its_cpu() -> None:
    assert GpuPool(0).take("a", 8) == {}
