"""`penstock profile`: what it plans, what it notes, and a simulated instance whose costs it finds."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from controlplane.model.step_sample import StepSample
from controlplane.planning.cascade.replica import ReplicaShape
from controlplane.planning.instance_profile import InstanceProfile, InstanceSizes
from engine_worker.engines.simulated import SimulatedEngine
from engine_worker.instance import Instance
from engine_worker.metrics import WorkerMetrics
from engine_worker.service import WorkerService
from engine_worker.step_watch import StepWatches
from mesh.errors import ConfigurationError
from mesh.membership import Member
from mesh.rpc.server import RpcServer
from mesh.runtime import GrpcTransport, SystemClock, SystemThreads
from mesh.store.embedded import EmbeddedStore
from penstock.v1 import worker_pb2_grpc
from services.cli.profile import COLUMNS
from services.cli.profiling.fitting import decode_points, uneven_points
from services.cli.profiling.lifetimes import Lifetimes
from services.cli.profiling.plan import Configuration, ProfileBounds, configurations, draw_lengths, uneven_pairs
from services.cli.profiling.profile_file import decode_profile, encode_profile, profile_rows, store_profile
from services.cli.profiling.run import known_shape, profile_instance
from services.cli.profiling.samples_file import ProfiledInstance, SamplesFile
from services.cli.simulation.costs import CostChoice
from simulator.cost.linear import LinearCost
from simulator.cost.model import BatchShape, PrefillChunk
from simulator.instance.config import InstanceConfig
from tests.unit.engine_worker.worker.running_worker import DESCRIPTION, SETTINGS

SIZES = InstanceSizes(16, 256, 2048, 8, 512)
COST = LinearCost(
    fixed_ms=8.0, prefill_token_ms=0.05, decode_request_ms=0.5, context_token_ms=1e-3, attended_pair_ms=1e-5
)
CONFIG = InstanceConfig(kv_blocks=256, max_model_len_tokens=2048, max_batch_requests=8, max_step_tokens=512)
TIME_SCALE = 0.05
ONE, EIGHT = ReplicaShape(1), ReplicaShape(4, 2)
BOUNDS = ProfileBounds(shortest_tokens=64, longest_tokens=600, largest_batch=4, most_answer_tokens=20, seconds=0.15)
FEW = ProfileBounds(shortest_tokens=64, longest_tokens=200, largest_batch=2, most_answer_tokens=8, seconds=0.4)


def test_buckets_double_and_batches_double_as_far_as_memory_holds_them() -> None:
    bounds = ProfileBounds(shortest_tokens=512, longest_tokens=9000, largest_batch=64)
    planned = configurations(bounds, SIZES)
    assert [(each.shortest_tokens, each.below_tokens, each.batch) for each in planned] == [
        (512, 1024, 1),
        (512, 1024, 2),
        (512, 1024, 4),
        (1024, 2048, 1),
        (1024, 2048, 2),
    ]
    with pytest.raises(ConfigurationError, match="too few"):
        configurations(ProfileBounds(shortest_tokens=4096), SIZES)


def test_an_uneven_batch_has_the_total_of_its_even_one_and_fits() -> None:
    bounds = ProfileBounds(shortest_tokens=64, longest_tokens=8192, largest_batch=64)
    pairs = uneven_pairs(bounds, InstanceSizes(16, 512, 8192, 128, 512))
    assert [(pair.even.batch, pair.even.shortest_tokens) for pair in pairs] == [(4, 2048), (16, 512), (64, 128)]
    rng = np.random.default_rng(0)
    for pair in pairs:
        others = draw_lengths(pair.uneven, bounds, rng)
        longest = draw_lengths(pair.uneven, bounds, rng, is_longest=True)
        total = (pair.uneven.batch - 1) * (others.prompt_tokens + others.answer_tokens)
        total += longest.prompt_tokens + longest.answer_tokens
        even = draw_lengths(pair.even, bounds, rng)
        assert pair.even.batch * (even.prompt_tokens + even.answer_tokens) == pytest.approx(total, rel=0.01)
        assert total <= 512 * 16
    assert uneven_pairs(replace_largest(bounds, 3), SIZES) == ()


def replace_largest(bounds: ProfileBounds, largest_batch: int) -> ProfileBounds:
    return msgspec.structs.replace(bounds, largest_batch=largest_batch)


def test_unevenness_is_told_at_equal_totals() -> None:
    (pair,) = uneven_pairs(replace_largest(BOUNDS, 4), SIZES)
    even = [StepSample(10.0, 0, 0.0, 4, 1000, 250)] * 20 + [StepSample(99.0, 64, 9.0, 4, 1000, 250)] * 30
    uneven = [StepSample(12.5, 0, 0.0, 4, 1100, 500)] * 20 + [StepSample(1.0, 0, 0.0, 3, 900, 300)] * 30
    (point,) = uneven_points([pair], {pair.even: even, pair.uneven: uneven}, context_token_ms=0.005)
    assert (point.requests, point.context_tokens, point.longest_tokens) == (4, 1000, 500)
    assert (point.level_ms, point.uneven_ms, point.error_ms) == (10.0, 12.0, 0.0)
    assert uneven_points([pair], {pair.even: even, pair.uneven: uneven[:4]}, 0.005) == ()


def test_lengths_stay_in_their_bucket() -> None:
    rng = np.random.default_rng(0)
    configuration = Configuration(64, 128, 1)
    for _ in range(200):
        lengths = draw_lengths(configuration, BOUNDS, rng)
        assert 64 <= lengths.prompt_tokens + lengths.answer_tokens < 128
        assert 2 <= lengths.answer_tokens <= BOUNDS.most_answer_tokens


def test_a_request_is_told_the_average_of_the_batches_that_it_ran_in() -> None:
    lifetimes = Lifetimes()
    lifetimes.submitted("a", 10, now_ms=0.0)
    lifetimes.submitted("b", 20, now_ms=100.0)
    lifetimes.produced("a", 1, now_ms=150.0)
    lifetimes.produced("a", 4, now_ms=200.0)
    lived = lifetimes.ended("a", now_ms=200.0)
    assert lived is not None
    assert lived.ttft_ms == 150.0
    assert lived.qoe.normalised_latency_ms == 40.0
    load = lived.qoe.load
    assert (load.requests, load.input_tokens, load.input_tokens_squared) == (1.5, 20.0, 300.0)
    assert load.total_tokens == pytest.approx((100 * 10 + 50 * 30 + 50 * 31) / 200)
    assert lifetimes.ended("b", now_ms=300.0) is None, "it brought no token"
    lifetimes.submitted("c", 7, now_ms=400.0)
    lifetimes.produced("c", 1, now_ms=500.0)
    alone = lifetimes.ended("c", now_ms=500.0)
    assert alone is not None
    assert (alone.qoe.load.requests, alone.qoe.load.total_tokens) == (pytest.approx(1.0), pytest.approx(7.0))


def test_decode_points_are_of_steps_that_only_decode() -> None:
    steps = [
        StepSample(9.0, 5, 1.0, 2, 90, 50),
        StepSample(2.0, 0, 0.0, 2, 100, 60),
        StepSample(4.0, 0, 0.0, 2, 102, 61),
    ]
    (point,) = decode_points([steps, [StepSample(1.0, 64, 9.0, 0, 0, 0)]])
    assert (point.running_tokens, point.step_ms) == (101, 3.0)


@asynccontextmanager
async def simulated_worker(shape: ReplicaShape) -> AsyncIterator[Member]:
    """A worker on loopback whose engine runs 20 times as fast as its costs say."""
    engine = SimulatedEngine(
        CONFIG, COST, SystemClock(), time_scale=TIME_SCALE, tensor_parallel=shape.tp, pipeline_parallel=shape.pp
    )
    limits = await engine.start()
    description = replace(
        DESCRIPTION,
        block_tokens=limits.block_tokens,
        kv_blocks=limits.kv_blocks,
        max_model_len_tokens=limits.max_model_len_tokens,
        max_batch_requests=limits.max_batch_requests,
        max_step_tokens=limits.max_step_tokens,
        tensor_parallel=limits.tensor_parallel,
        pipeline_parallel=limits.pipeline_parallel,
    )
    instance = Instance(engine, description, SETTINGS, WorkerMetrics(CollectorRegistry()), time.monotonic)
    server = RpcServer(GrpcTransport())
    service = WorkerService(instance, time.monotonic, SystemThreads(), steps=StepWatches(engine), device="simulated")
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, service, "penstock.v1.Worker")
    output = asyncio.create_task(instance.run())
    address = await server.start()
    try:
        yield Member("worker", "worker-0", "0badcafe", address, "", {"model": "m", "engine": "simulated"})
    finally:
        output.cancel()
        await asyncio.gather(output, return_exceptions=True)
        await server.stop(0.1)
        await engine.stop()


async def profile(
    path: Path, shape: ReplicaShape = ONE, bounds: ProfileBounds = BOUNDS
) -> tuple[InstanceProfile, list[Configuration]]:
    ran: list[Configuration] = []
    async with simulated_worker(shape) as member:
        found = await profile_instance(
            member,
            bounds,
            path,
            lambda configuration, _done, _total: ran.append(configuration) if configuration else None,
        )
    return found, ran


@pytest.mark.live
@pytest.mark.slow
async def test_the_costs_of_a_simulated_instance_come_back_and_simulate_the_same(tmp_path: Path) -> None:
    found, ran = await profile(tmp_path / "samples.jsonl")
    fitted = found.step.coefficients
    known = {
        "fixed_ms": COST.fixed_ms,
        "prefill_token_ms": COST.prefill_token_ms,
        "attended_pair_ms": COST.attended_pair_ms,
        "decode_request_ms": COST.decode_request_ms,
        "context_token_ms": COST.context_token_ms,
    }
    for name, value in known.items():
        assert getattr(fitted, name) == pytest.approx(value * TIME_SCALE, rel=1e-3), name
    assert found.step.relative_error < 1e-3
    assert (found.engine, found.device, found.sizes, found.shape) == ("simulated", "simulated", SIZES, ONE)
    assert len(ran) == len(configurations(BOUNDS, SIZES)) + 1
    (point,) = found.unevenness
    assert point.uneven_ms == pytest.approx(point.level_ms, rel=1e-2), "its costs go by totals alone"
    assert point.longest_tokens > 0.9 * point.context_tokens / 2
    assert dict(zip(COLUMNS, profile_rows([found])[0], strict=True))["uneven"].endswith(" at 4")
    assert fitted.longest_token_ms == pytest.approx(0.0, abs=1e-6)
    assert found.qoe.held_out_samples > 0
    assert found.ttft.prefill_ms(400) > found.ttft.prefill_ms(100)
    cost = CostChoice(profile=found).create()
    batch = BatchShape((PrefillChunk(100, 200),), np.array([300, 400]), 700)
    assert cost.step_ms(batch) == pytest.approx(COST.step_ms(batch) * TIME_SCALE, rel=1e-3)


@pytest.mark.live
@pytest.mark.slow
async def test_an_interrupted_profile_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    _, first = await profile(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-2]) + lines[-2][:40])
    _, second = await profile(path)
    assert second == first[-1:], "the pair of which one was cut off and one was missing"
    _, third = await profile(path)
    assert third == []


def test_samples_of_something_else_are_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    SamplesFile(path, ProfiledInstance("vllm", "m", "cpu", SIZES, BOUNDS))
    with pytest.raises(ConfigurationError, match="vllm m on cpu"):
        SamplesFile(path, ProfiledInstance("vllm", "m", "gpu", SIZES, BOUNDS))
    path.write_bytes(b"something else")
    with pytest.raises(ConfigurationError, match="no samples"):
        SamplesFile(path, ProfiledInstance("vllm", "m", "cpu", SIZES, BOUNDS))


@pytest.mark.live
@pytest.mark.slow
async def test_a_profile_knows_the_gpus_of_its_instance(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    found, ran = await profile(path, EIGHT, FEW)
    assert ran
    assert (found.shape, found.shape.gpus, found.name) == (EIGHT, 8, "simulated/m/simulated/tp4-pp2")
    assert msgspec.structs.replace(found, pipeline_parallel=1).key == "/penstock/profiles/simulated/m/simulated/tp4"
    assert decode_profile(encode_profile(found), "here").shape == EIGHT
    assert dict(zip(COLUMNS, profile_rows([found])[0], strict=True))["GPUs"] == "8 (TP=4,PP=2)"
    with pytest.raises(ConfigurationError, match="TP=4,PP=2"):
        await profile(path, ONE, FEW)  # an instance of one GPU: other samples
    head, rest = path.read_bytes().split(b"\n", 1)
    without = {name: value for name, value in json.loads(head).items() if name != "shape"}
    path.write_bytes(json.dumps(without).encode() + b"\n" + rest)
    again, ran = await profile(path, EIGHT, FEW)
    assert (ran, again.shape, again.step) == ([], EIGHT, found.step), "old samples are fitted anew, none is measured"
    kept = json.loads(encode_profile(found))
    del kept["tensor_parallel"], kept["pipeline_parallel"]
    old = decode_profile(json.dumps(kept).encode(), "here")
    assert (old.shape, old.name) == (ONE, "simulated/m/simulated")
    with pytest.raises(ConfigurationError, match="tensor_parallel"):
        decode_profile(json.dumps(kept | {"tensor_parallel": 0}).encode(), "here")


def test_the_worker_says_its_shape_and_its_operator_where_it_does_not() -> None:
    assert known_shape("w", EIGHT, None) == known_shape("w", None, EIGHT) == known_shape("w", EIGHT, EIGHT) == EIGHT
    with pytest.raises(ConfigurationError, match="w says that it runs with TP=4,PP=2, not TP=1"):
        known_shape("w", EIGHT, ONE)
    with pytest.raises(ConfigurationError, match="give penstock profile --tp and --pp"):
        known_shape("w", None, None)


@pytest.mark.live
@pytest.mark.slow
async def test_a_profile_survives_file_and_store(tmp_path: Path, store: EmbeddedStore) -> None:
    found, _ = await profile(tmp_path / "samples.jsonl", ONE, FEW)
    assert decode_profile(encode_profile(found), "here") == found
    await store.put("unrelated", b"1")
    await store_profile(store, found)
    (entry,) = (await store.range("/penstock/profiles/")).entries
    assert entry.key == "/penstock/profiles/simulated/m/simulated"
    assert decode_profile(entry.value, entry.key) == found
    with pytest.raises(ConfigurationError, match="version 99"):
        decode_profile(encode_profile(found).replace(b'"version": 1', b'"version": 99'), "here")
