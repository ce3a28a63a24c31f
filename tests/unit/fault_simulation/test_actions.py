"""What operators do takes effect in a simulated mesh, and no answer is another one for it."""

import asyncio
import random
from typing import Any

import pytest

from controlplane.policies.arrow.pools import Pool
from engine_worker.settings import PhaseName, WorkerSettings
from fault_simulation.actions import (
    Drain,
    Migrate,
    PlanStages,
    Restart,
    SetCascade,
    SwitchPolicy,
    SwitchRescheduler,
    SwitchStages,
)
from fault_simulation.nodes import SimulatedMesh
from fault_simulation.operator import Action, Outcome
from fault_simulation.oracle import COMPLETIONS_PATH
from penstock.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.unit.fault_simulation.small_mesh import (
    CASCADE,
    MODEL,
    MODEL_PATH,
    WORKERS,
    cascade_mesh,
    is_as_expected,
    oracle,
    send,
    small_mesh,
)

pytestmark = pytest.mark.slow

MIGRATIONS = "penstock_worker_migrations_total"
BLOCKS = "penstock_worker_migrated_kv_blocks_total"


class TargetMesh:
    """A mesh that serves, its requests and an operator."""

    def __init__(self, mesh: SimulatedMesh) -> None:
        self.mesh = mesh
        self.rng = random.Random(mesh.seed)
        self._known = oracle()

    async def request(self, tokens: int, prompt_words: int = 20, after_s: float = 0.0) -> bool:
        """Whether the answer to a long request is exact."""
        prompt = " ".join(str(self.rng.randrange(1000)) for _ in range(prompt_words))
        body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "min_tokens": tokens - 1}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        await asyncio.sleep(after_s)
        answer = await send(self.mesh, COMPLETIONS_PATH, body)
        return is_as_expected(answer, self._known.answer(COMPLETIONS_PATH, body))

    async def do(self, action: Action) -> Outcome:
        """It must be done."""
        outcome = await self.mesh.operator.perform(action)
        assert outcome.done, outcome
        return outcome

    def total(self, metric: str, **labels: str) -> float:
        """Over all workers."""
        names = [name for name in self.mesh.machines if name.startswith("worker-")]
        return sum(self.mesh.metric(name, metric, **labels) for name in names)


def run(mesh: SimulatedMesh, work: Any) -> None:
    async def main() -> None:
        for name in list(mesh.machines):
            mesh.start(name)
        await asyncio.sleep(5)
        await work(TargetMesh(mesh))

    mesh.run(main())
    assert not mesh.loop.findings, "\n".join(map(str, mesh.loop.findings))


@pytest.mark.parametrize("stop_and_copy", [False, True])
def test_a_request_that_is_migrated_goes_on_where_it_was_sent(stop_and_copy: bool) -> None:
    async def work(scene: TargetMesh) -> None:
        answers = [asyncio.create_task(scene.request(300)) for _ in range(4)]
        await asyncio.sleep(0.5)
        outcome = await scene.do(Migrate(7, "worker-2", stop_and_copy))
        assert " moved from " in outcome.what
        assert scene.mesh.metric("worker-2", BLOCKS) > 0
        assert all(await asyncio.gather(*answers))

    run(small_mesh(1), work)


def test_a_worker_that_is_drained_ends_and_comes_back() -> None:
    async def work(scene: TargetMesh) -> None:
        answers = [asyncio.create_task(scene.request(200, after_s=number / 10)) for number in range(20)]
        await asyncio.sleep(0.7)
        await scene.do(Drain("worker-1", back_after_s=1.0))
        assert scene.mesh.machines["worker-1"].lives == 2
        assert all(await asyncio.gather(*answers))

    run(small_mesh(2), work)


def test_a_member_that_is_restarted_serves_again() -> None:
    async def work(scene: TargetMesh) -> None:
        answers = [asyncio.create_task(scene.request(100, after_s=number / 10)) for number in range(20)]
        for role, name in (("worker", "worker-0"), ("scheduler", "scheduler"), ("monitor", "monitor")):
            await scene.do(Restart(name, role))
            assert scene.mesh.machines[name].lives == 2
        assert all(await asyncio.gather(*answers))

    run(small_mesh(3), work)


def test_the_policy_is_switched() -> None:
    async def work(scene: TargetMesh) -> None:
        await scene.do(SwitchPolicy("linear", (("lambda", 0.3),)))
        operator = scene.mesh.operator
        request = scheduler_pb2.GetPolicyRequest()
        policy = await operator.ask("scheduler", "", scheduler_pb2_grpc.SchedulerStub, "GetPolicy", request)
        assert (policy.policy, policy.parameters["lambda"]) == ("linear", 0.3)
        refused = await operator.perform(SwitchPolicy("no such policy"))
        assert not refused.done
        assert "no such policy" in refused.what

    run(small_mesh(4), work)


@pytest.mark.parametrize("mode", ["current", "predicted"])
def test_the_rescheduler_evens_out_the_load(mode: Any) -> None:
    async def work(scene: TargetMesh) -> None:
        mesh = scene.mesh
        for name in WORKERS[1:]:
            mesh.network.cut("frontend", name)
        answers = [asyncio.create_task(scene.request(600)) for _ in range(8)]
        await asyncio.sleep(0.3)
        mesh.network.heal_all()
        await scene.do(SwitchRescheduler(mode, (("interval_s", 0.2),)))
        assert all(await asyncio.gather(*answers))
        assert scene.total(MIGRATIONS, direction="in", outcome="committed") > 0

    run(small_mesh(5), work)


def test_stages_hand_requests_over_as_they_grow() -> None:
    mesh = small_mesh(7)
    mesh.add_planner("planner")

    async def work(scene: TargetMesh) -> None:
        await scene.do(SwitchPolicy("stages"))
        ended = [scene.request(scene.rng.choice((20, 600)), after_s=scene.rng.uniform(0, 4)) for _ in range(30)]
        assert all(await asyncio.gather(*ended))
        await scene.do(SwitchStages(True, fewest_lengths=10))
        await scene.do(PlanStages())
        await asyncio.sleep(2)
        ended = [scene.request(scene.rng.choice((20, 600)), after_s=scene.rng.uniform(0, 4)) for _ in range(30)]
        assert all(await asyncio.gather(*ended))
        assert scene.total("penstock_worker_stage_deals_total") > 0
        assert scene.total(MIGRATIONS, direction="in", outcome="committed") > 0
        await scene.do(SwitchStages(False))

    run(mesh, work)


def test_arrow_moves_instances_between_its_pools() -> None:
    async def work(scene: TargetMesh) -> None:
        await scene.do(SwitchPolicy("arrow", (("ttft_ms", 200.0), ("tpot_ms", 20.0))))
        seen: set[tuple[tuple[str, Pool], ...]] = set()

        async def look() -> None:
            while True:
                await asyncio.sleep(0.2)
                every = [(name, pool) for name in WORKERS for pool in Pool]
                seen.add(tuple(each for each in every if _is_in(scene.mesh, *each)))

        looking = asyncio.create_task(look())
        answers = [scene.request(150, prompt_words=300, after_s=scene.rng.uniform(0, 5)) for _ in range(60)]
        assert all(await asyncio.gather(*answers))
        looking.cancel()
        assert len(seen) > 1, seen
        assert scene.total(BLOCKS) > 0

    run(small_mesh(7), work)


def _is_in(mesh: SimulatedMesh, instance_id: str, pool: Pool) -> bool:
    return mesh.metric("scheduler", "penstock_scheduler_pool", instance=instance_id, pool=pool.value) == 1


def test_prefill_and_decode_apart_transfer_blocks() -> None:
    mesh = SimulatedMesh(8)
    mesh.add_monitor("monitor")
    mesh.add_scheduler("scheduler")
    mesh.add_frontend("frontend")
    phases: tuple[PhaseName, ...] = ("prefill", "decode", "decode")
    for name, phase in zip(WORKERS, phases, strict=True):
        mesh.add_worker(name, WorkerSettings(MODEL, str(MODEL_PATH), "simulated", phase=phase))

    async def work(scene: TargetMesh) -> None:
        assert all(await asyncio.gather(*(scene.request(100, prompt_words=60) for _ in range(8))))
        assert mesh.metric("worker-1", BLOCKS) + mesh.metric("worker-2", BLOCKS) > 0

    run(mesh, work)


def test_other_thresholds_are_taken_up() -> None:
    async def work(scene: TargetMesh) -> None:
        body = {"model": CASCADE, "prompt": "1 2 3", "max_tokens": 20, "temperature": 0.0}
        tiers = []
        for threshold in (0.0, 101.0):
            await scene.do(SetCascade(CASCADE, ("small", "large"), (threshold,)))
            await asyncio.sleep(1)
            tiers.append((await send(scene.mesh, COMPLETIONS_PATH, body)).tier)
        assert tiers == ["small", "large"]

    run(cascade_mesh(9), work)
