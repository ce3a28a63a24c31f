"""Latency tables of tiers, from simulated replicas."""

import numpy as np
import pytest

from controlplane.planning.cascade.replica import ReplicaShape
from controlplane.planning.cascade.sample import CascadeSample
from mesh.errors import ConfigurationError, PlanInfeasible
from simulator.cascade.curves import SimulatedCurves
from simulator.cascade.replica import LoadedLatency, alone_s, loaded_latency, saturation_per_s
from simulator.cascade.tier import PipelineCost, ReplicaModel, TierModel, stages_of
from simulator.cost.catalogue import MODELS
from simulator.cost.linear import LinearCost
from simulator.cost.model import BatchShape, PrefillChunk
from tests.unit.simulator.cascade.short_runs import short_runs

TIER = TierModel("Llama-3.1-8B", "H100", max_gpus=2)
RNG = np.random.default_rng(1)
INPUT_TOKENS = RNG.integers(50, 1500, 80)
OUTPUT_TOKENS = RNG.integers(5, 60, 80)


def test_a_model_gets_every_shape_that_it_fits_on() -> None:
    shapes = {replica.shape for replica in TierModel("Llama-3.3-70B", "H100").replicas()}
    assert ReplicaShape(1) not in shapes, "140 GB of weights"
    assert {ReplicaShape(2), ReplicaShape(8), ReplicaShape(4, 3), ReplicaShape(2, 2)} <= shapes
    assert {ReplicaShape(1, 2), ReplicaShape(1, 4)} <= shapes, "with no more than one embedding table on a device"
    assert all(shape.gpus <= 16 for shape in shapes)


def test_what_fits_nowhere_is_refused_and_what_is_unknown_is_named() -> None:
    with pytest.raises(ConfigurationError, match="no replica of DeepSeek-R1 fits on 2 RTX-4090D"):
        TierModel("DeepSeek-R1", "RTX-4090D", max_gpus=2).replicas()
    with pytest.raises(ConfigurationError, match="no model 'nobody'"):
        TierModel("nobody", "H100").replicas()


@pytest.mark.slow
def test_latency_rises_with_the_rate_and_falls_with_tensor_parallelism() -> None:
    one, two = (next(r for r in TIER.replicas() if r.shape == shape) for shape in (ReplicaShape(1), ReplicaShape(2)))

    def under(replica: ReplicaModel, part: float) -> LoadedLatency:
        saturation = saturation_per_s(replica, INPUT_TOKENS, OUTPUT_TOKENS)
        return loaded_latency(replica, INPUT_TOKENS, OUTPUT_TOKENS, part, saturation, seed=0)

    low, high, wide = under(one, 0.05), under(one, 0.9), under(two, 0.05)
    assert low.p95_s < high.p95_s
    assert low.mean_s < high.mean_s
    assert wide.p95_s < low.p95_s
    assert wide.mean_s < low.mean_s < low.p95_s
    assert under(one, 0.05) == low, "a seed, a result"


def test_a_request_alone_takes_its_chunks_and_its_tokens() -> None:
    cost = LinearCost()
    chunks_ms = [cost.step_ms(BatchShape(prefill=(PrefillChunk(*chunk),))) for chunk in ((512, 0), (88, 512))]
    tokens_ms = [cost.step_ms(BatchShape((), np.array([601 + step]), 601 + step)) for step in range(4)]
    assert alone_s(cost, 512, 600, 5) == pytest.approx(sum(chunks_ms + tokens_ms) / 1000)


def test_a_pipeline_adds_its_hops_to_single_steps_and_to_runs_alike() -> None:
    cost = PipelineCost(LinearCost(), hops=2, hop_ms=0.1, hop_ms_per_token=0.01)
    batch = BatchShape((), np.array([100, 200]), 300)
    assert cost.step_ms(batch) == pytest.approx(LinearCost().step_ms(batch) + 2 * (0.1 + 0.02))
    assert cost.decode_run_ms(batch, 2)[0] == cost.step_ms(batch)
    assert cost.decode_run_ms(batch, 2)[1] == cost.step_ms(batch.decode_only_after(1))


@pytest.mark.parametrize("model", ["Llama-3.3-70B", "DeepSeek-R1", "Llama-3.2-3B", "Mixtral-8x7B"])
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_the_stages_of_a_pipeline_hold_the_model_once_and_a_tied_table_at_both_ends(model: str, pp: int) -> None:
    spec = MODELS[model]
    stages = stages_of(spec, pp)
    table = 2.0 * spec.vocabulary_tokens * spec.hidden_size
    twice = table if spec.tied_embeddings and pp > 1 else 0.0
    assert sum(stage.weight_bytes() for stage in stages) == pytest.approx(spec.weight_bytes() + twice)
    assert sum(stage.layers for stage in stages) == spec.layers
    assert max(stage.layers for stage in stages) - min(stage.layers for stage in stages) <= 1
    assert all(not stage.vocabulary_tokens for stage in stages[1:-1])


def test_a_pipeline_shares_its_memory_among_the_batches_under_way() -> None:
    replicas = {replica.shape: replica for replica in TIER.replicas()}
    straight, cut = replicas[ReplicaShape(1)], replicas[ReplicaShape(1, 2)]
    assert cut.engines == 2
    # Half the weights on each device: more than twice the KV in all, in two shares.
    assert cut.engine.kv_blocks > straight.engine.kv_blocks


@pytest.mark.slow
@short_runs()
def test_curves_are_measured_once_for_like_lengths_and_kept() -> None:
    sample = CascadeSample(
        scores=np.full((80, 1), 50.0), input_tokens=INPUT_TOKENS, output_tokens=OUTPUT_TOKENS[:, None], rate_per_s=1.0
    )
    curves = SimulatedCurves(sample, [TIER])
    everything = np.arange(80)
    first = curves.curves(0, everything, OUTPUT_TOKENS)
    assert [curve.shape for curve in first] == [replica.shape for replica in TIER.replicas()]
    measured = curves.simulated
    assert measured == len(first)
    curves.curves(0, everything[1:], OUTPUT_TOKENS[1:])
    assert curves.simulated == measured
    again = SimulatedCurves(sample, [TIER], known=curves.measured)
    assert all(
        np.array_equal(one.p95_s, other.p95_s) and np.array_equal(one.mean_s, other.mean_s)
        for one, other in zip(again.curves(0, everything, OUTPUT_TOKENS), first, strict=True)
    )
    assert again.simulated == 0
    short = np.flatnonzero(OUTPUT_TOKENS < 20)
    of_short = again.curves(0, short, OUTPUT_TOKENS[short])
    assert np.mean([c.p95_s[0] for c in of_short]) < np.mean([c.p95_s[0] for c in first])


@pytest.mark.slow
@short_runs()
def test_shapes_whose_context_is_too_short_for_a_request_are_left_out() -> None:
    tier = TierModel("Llama-3.3-70B", "H100", max_gpus=4)
    narrow = tier.replicas()[0]
    longest = narrow.engine.max_model_len_tokens
    wide = [replica for replica in tier.replicas() if replica.engine.max_model_len_tokens > longest]
    assert wide
    sample = CascadeSample(np.full((3, 1), 50.0), np.array([60, 80, longest]), np.full((3, 1), 5), 1.0)
    curves = SimulatedCurves(sample, [tier])
    rows = np.arange(3)
    assert [curve.shape for curve in curves.curves(0, rows, sample.output_tokens[:, 0])] == [r.shape for r in wide]
    assert narrow.shape in [curve.shape for curve in curves.curves(0, rows[:2], sample.output_tokens[:2, 0])]
    endless = CascadeSample(np.full((1, 1), 50.0), np.array([500_000]), np.array([[5]]), 1.0)
    with pytest.raises(PlanInfeasible, match=r"a request of 500005 tokens.* holds more than 131072"):
        SimulatedCurves(endless, [tier]).curves(0, rows[:1], endless.output_tokens[:, 0])


def test_work_follows_the_lengths_of_each_request() -> None:
    sample = CascadeSample(np.full((3, 1), 50.0), np.array([10, 10, 900]), np.array([[5], [50], [50]]), 1.0)
    work_s = SimulatedCurves(sample, [TIER]).work(0).whole_s
    assert work_s[0] < work_s[1] < work_s[2]


@pytest.mark.slow
def test_answers_that_are_given_up_are_simulated_as_short_as_they_are() -> None:
    sample = CascadeSample(
        scores=np.full((80, 1), 50.0), input_tokens=INPUT_TOKENS, output_tokens=OUTPUT_TOKENS[:, None], rate_per_s=1.0
    )
    curves = SimulatedCurves(sample, [TIER])
    everything, part = np.arange(80), 1 + OUTPUT_TOKENS // 3
    whole, given_up = curves.curves(0, everything, OUTPUT_TOKENS), curves.curves(0, everything, part)
    assert curves.simulated == 2 * len(whole)
    for one, other in zip(given_up, whole, strict=True):
        assert one.mean_s[0] < 0.6 * other.mean_s[0]
        assert one.rates_per_s[-1] > other.rates_per_s[-1]
    replica = TIER.replicas()[0]
    alone = [
        alone_s(replica.cost, replica.engine.max_step_tokens, inputs, outputs)
        for inputs, outputs in zip(INPUT_TOKENS.tolist(), part.tolist(), strict=True)
    ]
    assert curves.work(0).seconds(part) == pytest.approx(alone, rel=0.02)
