"""One tier's answer, read as it comes."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
from prometheus_client import Histogram

from controlplane.protocols.cascade.confidence import RunningConfidence
from services.frontend.answers.choice import ChoicePiece, Finish, TokenPosition, choice_text
from services.frontend.answers.reader import AnswerReader
from services.frontend.answers.schema import Usage
from services.frontend.errors import bad_request
from services.frontend.requests.generation import Client, Generation, generating
from services.frontend.requests.models import ServedModel
from services.frontend.requests.plan import GenerationPlan, plan_request
from services.frontend.requests.schema import ChatCompletionRequest, CompletionRequest
from services.frontend.requests.service import FrontendService


@dataclass(frozen=True, slots=True)
class TierAnswer:
    """One tier's answer, complete or ended early, with what it cost."""

    plan: GenerationPlan
    text: str
    positions: tuple[TokenPosition, ...]
    """Logprobs, where they were asked for."""
    finish: Finish | None
    """Why it ended; None: it was ended early, and is not complete."""
    usage: Usage
    instance_id: str
    policy: str
    seconds: float
    confidence: float
    """The model's, so far, 0 to 100; 100 where no logprobs were asked for."""
    stop_reason: int | str | None = None
    """The stop token or the stop string that ended it."""

    @property
    def given_up(self) -> bool:
        """Whether it was not written to its end."""
        return self.finish is None

    @property
    def token_logprobs(self) -> list[float]:
        """Of its tokens, without the one that ended it; empty where they were not asked for."""
        said = _said(self.positions, self.finish, self.plan)
        return [position.logprobs.chosen.logprob for position in said]


@dataclass(frozen=True, slots=True)
class TierQuestion:
    """What a tier is asked."""

    request: ChatCompletionRequest | CompletionRequest
    request_id: str
    model: ServedModel
    began_s: float
    ttft: Histogram
    """Gets the time from `began_s` to the first token."""
    inter_token: Histogram
    may_wait: Callable[[], bool]
    """Whether it waits, or waits on, for an instance where the tier has none."""
    with_logprobs: bool
    """Record those of the chosen tokens although the client did not ask for any."""


class TierReader:
    """A tier's answer as it comes. What was shown is kept."""

    def __init__(self, service: FrontendService, generation: Generation, question: TierQuestion) -> None:
        text = choice_text(question.request, generation.plan, 0)
        self._clock = service.clock
        self._began_s = question.began_s
        self._reader = AnswerReader(generation, [text], question.ttft, question.inter_token, service.clock)
        self._waiting: list[ChoicePiece] = []
        self._pieces: list[ChoicePiece] = []
        self._confidence = RunningConfidence()
        self._last_s = question.began_s
        self.plan = generation.plan
        self.instance_id = generation.instance_ids[0]
        self.policy = generation.policies[0]

    @property
    def done(self) -> bool:
        """Whether the answer has ended."""
        return self._reader.done

    @property
    def confidence(self) -> float:
        """The model's, so far; 100 before anything was shown."""
        return self._confidence.score

    @property
    def tokens(self) -> int:
        """Generated so far."""
        return self._reader.usage().completion_tokens

    async def begin(self) -> None:
        """Wait until there is something to show, which `read` then brings. Raises ApiError if nothing ever is."""
        while not self._waiting:
            await self._reader.wait()
            self._waiting = self._read()

    async def hold(self) -> None:
        """Wait for more, and keep it for the next `read`. Raises ApiError if the generation failed."""
        await self._reader.wait()
        self._waiting += self._read()

    def wait(self) -> Awaitable[None]:
        """See `PieceSource`."""
        if not self._waiting:
            return self._reader.wait()
        ready = asyncio.get_running_loop().create_future()
        ready.set_result(None)
        return ready

    def read(self) -> list[ChoicePiece]:
        """See `PieceSource`."""
        shown, self._waiting = self._waiting or self._read(), []
        return shown

    def usage(self) -> Usage:
        """Tokens of the prompt and of what has come of the answer so far."""
        return self._reader.usage()

    def answer(self) -> TierAnswer:
        """So far; not before something was shown."""
        return TierAnswer(
            plan=self.plan,
            text="".join(piece.text for piece in self._pieces),
            positions=tuple(position for piece in self._pieces for position in piece.positions),
            finish=self._pieces[-1].finish,
            usage=self.usage(),
            instance_id=self.instance_id,
            policy=self.policy,
            seconds=self._last_s - self._began_s,
            confidence=self._confidence.score,
            stop_reason=self._pieces[-1].stop_reason,
        )

    def _read(self) -> list[ChoicePiece]:
        shown = self._reader.read()
        self._last_s = self._clock()
        for piece in shown:
            for position in _said(piece.positions, piece.finish, self.plan):
                self._confidence.add(position.logprobs.chosen.logprob)
        self._pieces += shown
        return shown


def _said(positions: Sequence[TokenPosition], finish: Finish | None, plan: GenerationPlan) -> Sequence[TokenPosition]:
    """Those that confidence goes by: how sure a model is of its end says little of what it has said, and thresholds
    were fitted without it."""
    is_end = finish == "stop" and positions and positions[-1].logprobs.chosen.token_id in plan.ending_token_ids
    return positions[:-1] if is_end else positions


Read: TypeAlias = Callable[[TierReader], Awaitable[None]]


def read_until(give_up_below: float, progressed: Callable[[TierReader], None] = lambda _: None) -> Read:
    """Reads the whole answer, or gives it up once the model's confidence in it falls below this score; 0: never.
    `progressed` is called with what has come."""

    async def read(reader: TierReader) -> None:
        await reader.begin()
        while not reader.done and reader.confidence >= give_up_below:
            progressed(reader)
            await reader.wait()
            reader.read()

    return read


async def ask_tier(service: FrontendService, question: TierQuestion, client: Client, read: Read) -> TierAnswer:
    """Let a model answer, as far as `read` wants it. Raises ApiError, as any request to the model would."""
    request = _with_logprobs(question.request) if question.with_logprobs else question.request
    with service.media.held(service.clock() + client.left_s(), client.tenant.name) as media:
        plan = await plan_request(request, question.request_id, question.model, 1, service.threads, media)
        return await _ask_planned(service, question, client, read, plan)


async def _ask_planned(
    service: FrontendService, question: TierQuestion, client: Client, read: Read, plan: GenerationPlan
) -> TierAnswer:
    if plan.read_by is not None:
        name = question.model.name
        message = f"The answers of `{name}` are read by vLLM's parsers, which cascades do without; ask `{name}` itself."
        raise bad_request(message, "model")
    async with generating(service, plan, question.began_s, client, may_wait=question.may_wait) as run:
        reader = TierReader(service, run.generation, question)
        try:
            await read(reader)
        finally:
            usage, metrics = reader.usage(), service.metrics.of(question.model.engine_model)
            metrics.generated_tokens.inc(usage.completion_tokens)
            metrics.cached_tokens.inc(usage.cached_tokens)
        answer = reader.answer()
        if answer.given_up:
            run.ends_as = "given up"
    return answer


def _with_logprobs(request: ChatCompletionRequest | CompletionRequest) -> ChatCompletionRequest | CompletionRequest:
    if isinstance(request, ChatCompletionRequest):
        return request if request.logprobs else msgspec.structs.replace(request, logprobs=True, top_logprobs=0)
    return request if request.logprobs is not None else msgspec.structs.replace(request, logprobs=0)
