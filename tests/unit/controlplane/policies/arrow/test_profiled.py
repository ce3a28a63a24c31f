"""What a profile of the instances gives a policy, and which profile that is."""

from dataclasses import replace

import msgspec
import pytest

from controlplane.policies.arrow.parameters import ArrowParameters, StaticParameters
from controlplane.policies.arrow.profiled import profile_for, profiled
from controlplane.policies.parameters import PolicyParameters
from controlplane.prediction.running_tokens import DecodePoint
from tests.unit.controlplane.builders import instance, profile

CURVE = {"prefill_fixed_ms": 5.0, "prefill_token_ms": 0.5, "prefill_token_squared_ms": 0.0}


def test_what_nobody_has_set_is_the_profiles_and_the_rest_stays() -> None:
    values = profiled(ArrowParameters(tpot_ms=40.0), profile(0.5))
    assert values == {**ArrowParameters(tpot_ms=40.0).values(), **CURVE, "max_running_tokens": 5000}
    assert profiled(StaticParameters(), profile(0.5)) == {**StaticParameters().values(), **CURVE}


@pytest.mark.parametrize("name", CURVE)
def test_a_curve_of_which_anything_is_set_is_kept_as_a_whole(name: str) -> None:
    own = StaticParameters(**{name: 2.0})
    assert profiled(own, profile(0.5)) == own.values()


def test_max_running_tokens_that_are_set_stay() -> None:
    assert profiled(ArrowParameters(max_running_tokens=77), profile(0.5))["max_running_tokens"] == 77


def test_policies_that_predict_nothing_keep_theirs() -> None:
    assert profiled(PolicyParameters(), profile(0.5)) == {}


def test_a_profile_with_no_batch_within_the_tpot_leaves_no_room() -> None:
    assert profiled(ArrowParameters(tpot_ms=1.0), profile(0.5))["max_running_tokens"] == 1


def test_a_profile_of_one_batch_says_nothing_of_max_running_tokens() -> None:
    points = (DecodePoint(1000, 20.0), DecodePoint(1000, 21.0))
    one = msgspec.structs.replace(profile(0.5), decode_points=points)
    assert profiled(ArrowParameters(), one)["max_running_tokens"] == 0


def test_of_several_profiles_the_slowest_counts_and_only_of_what_is_there() -> None:
    fast, slow, other = profile(0.1), profile(0.9), profile(5.0, model="other")
    here = [instance("a"), instance("b")]
    assert profile_for(here, [fast, slow, other]) == slow
    assert profile_for(here, [slow, fast]) == slow
    assert profile_for(here, [other]) is None
    assert profile_for(here, [msgspec.structs.replace(slow, engine="vllm")]) is None
    assert profile_for([], [fast]) is None


def test_profiles_of_as_many_gpus_go_before_others() -> None:
    fast, slow = profile(0.1), profile(0.9)
    wide = msgspec.structs.replace(slow, tensor_parallel=4)
    deep = msgspec.structs.replace(slow, pipeline_parallel=4)
    here = [instance("a"), instance("b")]
    assert profile_for(here, [wide, deep, fast]) == fast, "these have one GPU each"
    fast_wide = msgspec.structs.replace(fast, tensor_parallel=4)
    assert profile_for([replace(each, tensor_parallel=4) for each in here], [slow, deep, fast_wide]) == fast_wide
    assert profile_for(here, [wide]) == wide, "better than none"


def test_profiles_are_compared_by_a_prompt_of_a_thousand_tokens() -> None:
    steep = msgspec.structs.replace(profile(0.1), ttft=msgspec.structs.replace(profile(0.1).ttft, token_squared_ms=1.0))
    assert profile_for([instance("a")], [steep, profile(900.0)]) == steep
    assert profile_for([instance("a")], [steep, profile(1100.0)]) != steep
