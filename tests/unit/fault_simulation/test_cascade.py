"""A cascade of two tiers of simulated engines, judged by the cascade router."""

import asyncio
import random

import pytest

from fault_simulation.actions import SetCascade
from fault_simulation.cascade_oracle import CascadeOracle
from fault_simulation.oracle import Oracle
from tests.unit.fault_simulation.small_mesh import CASCADE, LARGE, SMALL, cascade_mesh, request, send


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [0.0, 75.0, 101.0])
def test_the_accepted_answer_is_that_of_the_tier_that_the_judge_says(threshold: float) -> None:
    mesh, rng = cascade_mesh(1), random.Random(1)
    known = CascadeOracle([Oracle.of(SMALL), Oracle.of(LARGE)])

    async def one(after_s: float) -> str:
        path, body = request(rng)
        asked = {**body, "model": CASCADE, "n": 1}
        await asyncio.sleep(after_s)
        answer = await send(mesh, path, asked)
        expected = known.answer(path, asked, (threshold,))
        assert expected.is_exact(answer), answer
        assert answer.tier == expected.tier, answer
        return answer.tier

    async def main() -> set[str]:
        for name in list(mesh.machines):
            mesh.start(name)
        await asyncio.sleep(5)
        assert (await mesh.operator.perform(SetCascade(CASCADE, ("small", "large"), (threshold,)))).done
        await asyncio.sleep(2)
        return set(await asyncio.gather(*(one(rng.uniform(0, 10)) for _ in range(15))))

    tiers = mesh.run(main())
    assert not mesh.loop.findings, "\n".join(map(str, mesh.loop.findings))
    assert tiers == {0.0: {"small"}, 75.0: {"small", "large"}, 101.0: {"large"}}[threshold]
