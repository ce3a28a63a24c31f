"""Which replicas plans want, what they are called and in which shape they run; and which GPUs they get."""

from collections import Counter

import pytest

from controlplane.deployment.gpus import GpuPool
from controlplane.deployment.replicas import cores_of, new_name, shape_of, shaped, wanted_by
from controlplane.planning.cascade.plan import CascadePlan, PlannedReplicas, PlannedTier
from mesh.errors import ConfigurationError


def plan(name: str, *tiers: PlannedTier) -> CascadePlan:
    return CascadePlan(name, tiers, (0.0,) * (len(tiers) - 1), 1.0, 1.0, 1.0, 99)


def test_cascades_that_share_a_model_each_have_their_replicas() -> None:
    one = plan(
        "one",
        PlannedTier("small", 4, (PlannedReplicas(2), PlannedReplicas(1, tp=2)), 1.0, 1.0),
        PlannedTier("large", 0, (), 0.0, 0.0),
    )
    two = plan("two", PlannedTier("small", 1, (PlannedReplicas(1),), 1.0, 1.0))
    assert wanted_by([one, two]) == {"small": Counter({(1, 1): 3, (2, 1): 1}), "large": Counter()}
    assert list(wanted_by([one])) == ["small", "large"]
    assert wanted_by([]) == {}


def test_a_new_instance_gets_the_first_name_that_is_free() -> None:
    assert new_name("m", ()) == "m-0"
    assert new_name("m", {"m-0", "m-2", "frontend"}) == "m-1"
    assert new_name("org/m", {"org--m-0"}) == "org--m-1", "ids hold no slash"


def test_shapes_are_read_from_and_written_into_engine_settings() -> None:
    assert shape_of(("dtype=float32",)) == (1, 1)
    assert shape_of(("tensor_parallel_size=4", "pipeline_parallel_size=2")) == (4, 2)
    assert shape_of(("tensor_parallel_size=all", "pipeline_parallel_size=2")) == (1, 2), (
        "what is no number the engine refuses"
    )
    assert [cores_of(each) for each in ((), ("data_parallel_size=2", "dtype=float32"))] == [1, 2]
    assert shaped((), (1, 2)) == ("pipeline_parallel_size=2",)
    assert shaped(("tensor_parallel_size=2", "pipeline_parallel_size=4"), (1, 1)) == ()
    assert shaped(("tensor_parallel_size=2=3", "served_name=a=b"), (1, 1)) == ("served_name=a=b",)
    assert shaped(("dtype=float32", "tensor_parallel_size=4"), (2, 3)) == (
        "dtype=float32",
        "tensor_parallel_size=2",
        "pipeline_parallel_size=3",
    )


def test_each_engine_core_has_gpus_of_its_own() -> None:
    assert GpuPool(8, cores=2).room_of((2, 1)) == 4
    assert GpuPool(0, cores=2).room_of((2, 1)) == 1, "a place on the CPU"


def test_instances_get_gpus_of_their_own_and_give_them_back() -> None:
    pool = GpuPool(4)
    assert pool.take("a", 2) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert pool.take("b", 1) == {"CUDA_VISIBLE_DEVICES": "2"}
    with pytest.raises(ConfigurationError, match="c needs 2 of 4 GPUs here, of which 1 are free"):
        pool.take("c", 2)
    pool.give_back("a")
    pool.give_back("a")
    assert pool.free == 3
    assert pool.take("c", 3) == {"CUDA_VISIBLE_DEVICES": "0,1,3"}
    assert (pool.free, pool.room_of((2, 2))) == (0, 4)


def test_a_machine_without_gpus_has_places_on_its_cpu_whatever_the_shape() -> None:
    pool = GpuPool(0, cpu_places=2)
    assert pool.take("a", 8) == {}
    assert (pool.free, pool.room_of((2, 2))) == (1, 1)
    pool.take("b", 1)
    pool.take("c", 1)  # whoever asks is served, only plans are bounded
    assert pool.free == 0
    pool.give_back("b")
    pool.give_back("c")
    assert pool.free == 1
