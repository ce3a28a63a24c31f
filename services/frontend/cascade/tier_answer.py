"""One tier's whole answer."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from prometheus_client import Histogram

from controlplane.protocols.cascade.confidence import RunningConfidence
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
    finish: Finish | None
    """None: it was given up, and is not complete."""
    usage: Usage
    instance_id: str
    policy: str
    seconds: float
    confidence: float
    """The model's, so far, 0 to 100; 100 where no logprobs were asked for."""

    @property
    def given_up(self) -> bool:
        """Whether it was not written to its end."""
        return self.finish is None

    @property
    def token_logprobs(self) -> list[float]:
        """Of its tokens; empty where they were not asked for."""
        return [position.logprobs.chosen.logprob for position in self.positions]


async def ask_tier(
    service: FrontendService,
    request: ChatCompletionRequest | CompletionRequest,
    request_id: str,
    model: ServedModel,
    began_s: float,
    left_s: Callable[[], float],
    ttft: Histogram,
    with_logprobs: bool,
    give_up_below: float,
) -> TierAnswer:
    """Let a model answer. Raises ApiError, as any request to the model would.

    `ttft` gets the time from `began_s` to the first token. `with_logprobs`: record those of the chosen tokens although
    the client did not ask for any. The answer is given up once the model's confidence in it falls below
    `give_up_below`; 0: never.
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
            answer = await _read(service, generation, model, request, began_s, ttft, give_up_below)
        finally:
            expire.cancel()
        outcome = "given up" if answer.given_up else "finished"
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
    give_up_below: float,
) -> TierAnswer:
    (relay,) = generation.relays
    endings = model.text.eos_token_ids.union(request.stop_token_ids or ())
    text = ChoiceText(0, model.text.detokenizer(relay.prompt_token_ids), generation.plan.stop, endings)
    metrics = service.metrics.of(model.name)
    reader = AnswerReader(generation, [text], ttft, metrics.inter_token, service.clock)
    pieces: list[ChoicePiece] = []
    confidence = RunningConfidence()
    while not reader.done and not (pieces and confidence.score < give_up_below):
        shown = await reader.next()
        for position in (position for piece in shown for position in piece.positions):
            confidence.add(position.logprobs.chosen.logprob)
        pieces += shown
    usage = reader.usage()
    metrics.generated_tokens.inc(usage.completion_tokens)
    metrics.cached_tokens.inc(usage.prompt_tokens_details.cached_tokens)
    return TierAnswer(
        plan=generation.plan,
        text="".join(piece.text for piece in pieces),
        positions=tuple(position for piece in pieces for position in piece.positions),
        finish=pieces[-1].finish,
        usage=usage,
        instance_id=generation.instance_ids[0],
        policy=generation.policies[0],
        seconds=service.clock() - began_s,
        confidence=confidence.score,
    )


def _with_logprobs(request: ChatCompletionRequest | CompletionRequest) -> ChatCompletionRequest | CompletionRequest:
    if isinstance(request, ChatCompletionRequest):
        return request if request.logprobs else msgspec.structs.replace(request, logprobs=True, top_logprobs=0)
    return request if request.logprobs is not None else msgspec.structs.replace(request, logprobs=0)
