"""An engine whose steps a test scripts one by one."""

import asyncio
from collections.abc import AsyncIterator, Iterable

from controlplane.model.instance import KvBlocks, LoadReport
from controlplane.model.request import EngineRequest, FinishReason, SamplingParams, StepOutput, TokenDelta
from engine_worker.engines.interface import EngineLimits
from mesh.errors import EngineFailed, RequestRefused

LIMITS = EngineLimits(
    block_tokens=16, kv_blocks=100, max_model_len_tokens=1024, max_batch_requests=32, max_step_tokens=256
)


def make_request(request_id: str, *, prompt: int = 3, max_tokens: int = 100, emitted: int = 0) -> EngineRequest:
    """A valid request; its prompt tokens are 0, 1, 2 ... and its emitted ones 100, 101, 102 ..."""
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=tuple(range(prompt)),
        sampling=SamplingParams(max_tokens=max_tokens),
        emitted_token_ids=tuple(range(100, 100 + emitted)),
    )


class FakeEngine:
    """Does nothing until `step`, `die` or `change_cache` is called. Token n of every request is 100 + n."""

    def __init__(self, limits: EngineLimits = LIMITS) -> None:
        self.limits = limits
        self.requests: dict[str, int] = {}
        """Request id: number of tokens generated so far."""
        self.aborted: list[str] = []
        self.present_load = LoadReport()
        self.stopped = False
        self._outputs: asyncio.Queue[StepOutput | EngineFailed | None] = asyncio.Queue()
        self._cache: asyncio.Queue[KvBlocks | EngineFailed | None] = asyncio.Queue()

    async def start(self) -> EngineLimits:
        """Ready at once."""
        return self.limits

    def submit(self, request: EngineRequest) -> None:
        """Refuses prompts longer than the model's context."""
        if len(request.prompt_token_ids) > self.limits.max_model_len_tokens:
            raise RequestRefused(f"{len(request.prompt_token_ids)} prompt tokens are more than the model takes")
        self.requests[request.request_id] = len(request.emitted_token_ids)

    def abort(self, request_id: str) -> None:
        """Noted; `step` then ends the request."""
        self.aborted.append(request_id)

    def step(self, finish: Iterable[str] = (), tokens: int = 1) -> StepOutput:
        """One step: every request gets `tokens` tokens, those in `finish` end, aborted ones end without any."""
        finish = set(finish)
        deltas = []
        for request_id, offset in list(self.requests.items()):
            if request_id in self.aborted:
                deltas.append(TokenDelta(request_id, offset, (), finish_reason=FinishReason.ABORT))
                del self.requests[request_id]
                continue
            token_ids = tuple(range(100 + offset, 100 + offset + tokens))
            reason = FinishReason.STOP if request_id in finish else None
            deltas.append(TokenDelta(request_id, offset, token_ids, finish_reason=reason))
            self.requests[request_id] = offset + tokens
            if reason is not None:
                del self.requests[request_id]
        self.present_load = LoadReport(
            running_requests=len(self.requests),
            generated_tokens_total=self.present_load.generated_tokens_total + tokens * len(deltas),
            step_ms=10.0,
        )
        output = StepOutput(tuple(deltas))
        self._outputs.put_nowait(output)
        return output

    def put_step(self, *deltas: TokenDelta) -> None:
        """A step exactly as given, right or wrong."""
        self._outputs.put_nowait(StepOutput(deltas))

    def die(self, reason: str = "core dumped") -> None:
        """Both iterators raise."""
        self._outputs.put_nowait(EngineFailed(reason))
        self._cache.put_nowait(EngineFailed(reason))

    def change_cache(self, change: KvBlocks) -> None:
        """A change of the prefix cache."""
        self._cache.put_nowait(change)

    async def outputs(self) -> AsyncIterator[StepOutput]:
        """As scripted."""
        while (item := await self._outputs.get()) is not None:
            if isinstance(item, EngineFailed):
                raise item
            yield item

    def load(self) -> LoadReport:
        """As of the last step."""
        return self.present_load

    async def kv_blocks(self) -> AsyncIterator[KvBlocks]:
        """As scripted."""
        while (item := await self._cache.get()) is not None:
            if isinstance(item, EngineFailed):
                raise item
            yield item

    async def stop(self) -> None:
        """Both iterators end."""
        self.stopped = True
        self._outputs.put_nowait(None)
        self._cache.put_nowait(None)
