"""One tier's whole answer."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from prometheus_client import Histogram

from services.frontend.answers.choice import ChoicePiece, ChoiceText, Finish, TokenPosition
from services.frontend.answers.reader import AnswerReader
from services.frontend.api.answer_schema import Usage
from services.frontend.api.errors import deadline_exceeded
from services.frontend.api.schema import ChatCompletionRequest, CompletionRequest
from services.frontend.generation import Generation
from services.frontend.models import ServedModel
from services.frontend.plan import GenerationPlan, plan_request
from services.frontend.service import FrontendService


@dataclass(frozen=True, slots=True)
class TierAnswer:
    """What a tier said."""

    plan: GenerationPlan
    text: str
    positions: tuple[TokenPosition, ...]
    """Logprobs, where they were asked for."""
    finish: Finish
    usage: Usage
    instance_id: str
    policy: str
    seconds: float

    @property
    def mean_logprob(self) -> float | None:
        """Of the answer's tokens; None where they were not asked for or there are none."""
        if not self.positions:
            return None
        chosen = [position.logprobs.chosen.logprob for position in self.positions]
        return sum(chosen) / len(chosen)


async def ask_tier(
    service: FrontendService,
    request: ChatCompletionRequest | CompletionRequest,
    request_id: str,
    model: ServedModel,
    began_s: float,
    left_s: Callable[[], float],
    ttft: Histogram,
    with_logprobs: bool,
) -> TierAnswer:
    """Let a model answer in full. Raises ApiError, as any request to the model would.

    `ttft` gets the time from `began_s` to the first token. `with_logprobs`: record those of the chosen tokens although
    the client did not ask for any.
    """
    if with_logprobs:
        request = _with_logprobs(request)
    plan = await plan_request(request, request_id, model, max_choices=1)
    generation = Generation(plan, began_s, service.generation_bounds, lambda: None)
    service.running[request_id] = generation
    outcome = "aborted"
    try:
        await generation.start(service.pool, service.placement, service.metrics, service.clock)
        expire = asyncio.get_running_loop().call_later(
            left_s(), generation.mailbox.fail, deadline_exceeded(service.settings.request_deadline_s)
        )
        try:
            answer = await _read(service, generation, model, request, began_s, ttft)
        finally:
            expire.cancel()
        outcome = "finished"
        return answer
    finally:
        generation.close(outcome == "finished", outcome)
        del service.running[request_id]


async def _read(
    service: FrontendService,
    generation: Generation,
    model: ServedModel,
    request: ChatCompletionRequest | CompletionRequest,
    began_s: float,
    ttft: Histogram,
) -> TierAnswer:
    (relay,) = generation.relays
    endings = model.text.eos_token_ids.union(request.stop_token_ids or ())
    text = ChoiceText(0, model.text.detokenizer(relay.prompt_token_ids), generation.plan.stop, endings)
    metrics = service.metrics.of(model.name)
    reader = AnswerReader(generation, [text], ttft, metrics.inter_token, service.clock)
    pieces: list[ChoicePiece] = []
    while not reader.done:
        pieces += await reader.next()
    usage = reader.usage()
    metrics.generated_tokens.inc(usage.completion_tokens)
    metrics.cached_tokens.inc(usage.prompt_tokens_details.cached_tokens)
    finish = pieces[-1].finish
    assert finish is not None, "the last piece ends the choice"
    return TierAnswer(
        plan=generation.plan,
        text="".join(piece.text for piece in pieces),
        positions=tuple(position for piece in pieces for position in piece.positions),
        finish=finish,
        usage=usage,
        instance_id=generation.instance_ids[0],
        policy=generation.policies[0],
        seconds=service.clock() - began_s,
    )


def _with_logprobs(request: ChatCompletionRequest | CompletionRequest) -> ChatCompletionRequest | CompletionRequest:
    if isinstance(request, ChatCompletionRequest):
        return request if request.logprobs else msgspec.structs.replace(request, logprobs=True, top_logprobs=0)
    return request if request.logprobs is not None else msgspec.structs.replace(request, logprobs=0)
