"""What the autoscaler takes from requests that ended and from instances, for their profile."""

import pytest

from controlplane.planner.autoscale.demand import length_of, profile_name_of
from controlplane.planning.autoscale.profiled_capacity import RequestLength
from penstock.v1 import frontend_pb2, worker_pb2
from tests.unit.simulator.cascade.instance_profiles import profile_of


@pytest.mark.parametrize(
    ("prompt", "cached", "generated", "choices", "length"),
    [
        (100, 0, 30, 1, RequestLength(100, 30)),
        (100, 64, 30, 3, RequestLength(36, 10)),
        (100, 100, 1, 0, RequestLength(1, 1)),
        (100, 160, 1, 4, RequestLength(1, 1)),
    ],
)
def test_what_was_cached_is_not_computed(
    prompt: int, cached: int, generated: int, choices: int, length: RequestLength
) -> None:
    ended = frontend_pb2.EndedRequest(
        prompt_tokens=prompt, cached_tokens=cached, generated_tokens=generated, choices=choices
    )
    assert length_of(ended) == length


@pytest.mark.parametrize("degrees", [(1, 1), (4, 1), (4, 2)])
def test_an_instance_has_the_profile_of_its_kind(degrees: tuple[int, int]) -> None:
    profile = profile_of("m", 1.0, *degrees)
    told = worker_pb2.InstanceDescription(
        instance_id="m-0",
        model="m",
        engine=profile.engine,
        device=profile.device,
        tensor_parallel=degrees[0] if degrees[0] > 1 else 0,
        pipeline_parallel=degrees[1] if degrees[1] > 1 else 0,
    )
    assert profile_name_of(told) == profile.name
