"""One request to a pooling model while it is answered."""

from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.model.pooling import PoolingTask
from controlplane.model.request import Tenant
from services.frontend.errors import bad_request
from services.frontend.placement.pooler import PoolingRequest, Vectors
from services.frontend.requests.models import ServedModel
from services.frontend.requests.service import FrontendService


@dataclass(frozen=True, slots=True)
class PoolingCall:
    """What is known of it before its inputs are read."""

    service: FrontendService
    model: ServedModel
    request_id: str
    ends_s: float
    """Its deadline."""
    priority: int
    tenant: Tenant

    async def pool(
        self,
        prompts: Sequence[Sequence[int]],
        task: PoolingTask,
        *,
        dimensions: int | None = None,
        use_activation: bool | None = None,
        cache_salt: str | None = None,
        first_segments: Sequence[int] = (),
    ) -> list[Vectors]:
        """For each prompt, in order: one vector, or one for each token. `first_segments`: see `PoolingRequest`. Raises
        ApiError."""
        request = PoolingRequest(
            request_id=self.request_id,
            model=self.model.name,
            ends_s=self.ends_s,
            deadline_s=self.service.settings.request_deadline_s,
            prompts=prompts,
            task=task,
            dimensions=dimensions,
            use_activation=use_activation,
            priority=self.priority,
            cache_salt=self.service.cache_salt(self.tenant, cache_salt or ""),
            first_segments=first_segments,
        )
        rows = await self.service.pooler.results(request)
        self.service.metrics.of(self.model.name).prompt_tokens.inc(sum(map(len, prompts)))
        return rows

    def task(self, wanted: PoolingTask | None, param: str = "task") -> PoolingTask:
        """The one that is asked for, by a parameter, or what the model is for. Raises ApiError (400)."""
        does = pooling_tasks(self.model)
        if wanted is None:
            return does[0]
        if wanted not in does:
            raise bad_request(f"Unsupported task: '{wanted}'. `{self.model.name}` does {', '.join(does)}.", param)
        return wanted


def pooling_tasks(model: ServedModel) -> tuple[PoolingTask, ...]:
    """What it can do; the first is what it is for. Raises ApiError (400) for a model that generates."""
    known: tuple[PoolingTask, ...] = ("embed", "classify", "token_embed", "token_classify")
    if model.adapter is not None:
        raise bad_request(f"`{model.name}` is a LoRA adapter; those of pooling models are not served.", "model")
    does = tuple(task for announced in model.tasks for task in known if task == announced)
    if not does:
        raise bad_request(
            f"`{model.name}` generates; a pooling model is needed (its workers run with --engine-arg runner=pooling).",
            "model",
        )
    return does
