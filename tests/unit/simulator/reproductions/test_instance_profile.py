import pytest

from simulator.cluster.config import ClusterConfig
from simulator.cost.catalogue import instance_for
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig
from simulator.report.report import Slo
from simulator.reproductions.instance_profile import fit_instance, profile_running_tokens, profile_ttft
from simulator.reproductions.measurement import System, Workload, outcomes_at
from simulator.traces.source import TraceRecipe


def test_the_profile_is_what_an_idle_instance_takes() -> None:
    config, cost = InstanceConfig(), LinearCost()
    points = {point.prompt_tokens: point.ttft_ms for point in profile_ttft(config, cost)}
    assert list(points) == [64, 128, 256, 512, 1024, 2048, 4096]
    # So slowly that each request has the instance to itself.
    recipe = TraceRecipe("synthetic", seed=1, clip_end_s=5, rate_scale=0.01)
    system = System(ClusterConfig(1, config), cost, "colocated")
    curve = fit_instance(config, cost)
    for outcome in outcomes_at(system, Workload(recipe, Slo(), keeps_prefixes=False), 1.0):
        assert outcome.ttft_ms == pytest.approx(curve.prefill_ms(outcome.input_tokens), rel=0.1)


def test_the_fit_is_close_to_a_roofline_profile() -> None:
    config, cost = instance_for("Llama-3.1-8B", "H800")
    curve = fit_instance(config, cost)
    for point in profile_ttft(config, cost):
        assert curve.prefill_ms(point.prompt_tokens) == pytest.approx(point.ttft_ms, rel=0.25)


def test_memory_or_the_tpot_limits_the_running_tokens() -> None:
    config, cost = InstanceConfig(kv_blocks=20_000), LinearCost()
    kv_tokens = 20_000 * 16
    assert profile_running_tokens(config, cost, tpot_ms=1000) == kv_tokens
    # 9.9 ms + 256 x 0.02 ms + 8e-5 ms a token.
    assert profile_running_tokens(config, cost, tpot_ms=25.02) == pytest.approx(125_000, rel=0.01)
    assert profile_running_tokens(config, cost, tpot_ms=10) == 0
