"""A whole frontend with a cascade of two models, one fake worker each, and a router that judges as a test says."""

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from controlplane.model.cascade_record import CascadeRecord
from penstock.v1 import cascade_pb2, request_pb2
from tests.unit.services.frontend.fakes import Delta, FakeRouter, Script, by_model, tokens
from tests.unit.services.frontend.mesh_of_fakes import MeshOfFakes, mesh_of_fakes

EOS = 1
USER: Any = [{"role": "user", "content": "Say something."}]
RECORD = CascadeRecord("both", ("small", "large"), (70.0,), judges=("fake",))
Score = Callable[[cascade_pb2.JudgeRequest], float | None]


@dataclass
class Cascade:
    mesh: MeshOfFakes
    router: FakeRouter

    async def ask(self, **options: Any) -> Any:
        """The raw response."""
        create = self.mesh.client().chat.completions.with_raw_response.create
        return await create(**{"model": "both", "messages": USER, **options})


def saying(mesh: MeshOfFakes, text: str) -> Script:
    """With the log-probabilities of an unsure model, where they are asked for."""

    def script(request: request_pb2.GenerateRequest) -> list[Delta]:
        deltas = tokens(*([token_id] for token_id in [*mesh.ids(text), EOS]))
        if request.sampling.HasField("logprobs"):
            for delta in deltas:
                chosen = request_pb2.TokenLogprob(token_id=delta.token_ids[0], logprob=math.log(0.5))
                delta.logprobs.append(request_pb2.PositionLogprobs(chosen=chosen))
        return deltas

    return script


@asynccontextmanager
async def cascade(
    model_path: Path, score: Score, record: CascadeRecord = RECORD, *, large_step_s: float = 0.0, **settings: Any
) -> AsyncIterator[Cascade]:
    """Two tiers, one worker each; `settings` are the frontend's."""
    async with mesh_of_fakes(model_path, **settings) as mesh:
        mesh.scheduler.choose = by_model({"small": "worker-small", "large": "worker-large"})
        await mesh.add_worker(saying(mesh, "Hm."), instance_id="worker-small", model="small")
        await mesh.add_worker(
            saying(mesh, "Something."), instance_id="worker-large", model="large", step_s=large_step_s
        )
        router = FakeRouter(score)
        await router.start()
        mesh.directory.join(router.member)
        await mesh.store.put(record.key, msgspec.json.encode(record))
        await mesh.until(lambda: record.name in mesh.cascades.records)
        for tier in ("small", "large"):
            await mesh.service.catalogue.find(tier)  # a tier is served once its tokenizer has been read
        try:
            yield Cascade(mesh, router)
        finally:
            await router.stop()
