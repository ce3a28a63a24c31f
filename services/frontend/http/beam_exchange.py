"""The answer of a beam search: all its choices come at once, at the end; those of several prompts one search after the
other."""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import replace

import msgspec
from starlette.types import Scope

from penstock.v1 import request_pb2
from services.frontend.answers.choice import ChoicePiece, choice_text
from services.frontend.answers.formats import answer_format
from services.frontend.answers.outside import OutsidePieces
from services.frontend.answers.schema import PromptTokensDetails, Usage
from services.frontend.answers.sender import AnswerSender, PieceSource
from services.frontend.errors import bad_request
from services.frontend.http.exchange import INSTANCE_HEADER, POLICY_HEADER, ModelExchange
from services.frontend.media.service import MediaLoader
from services.frontend.requests.beam_search import MAX_BEAMS, Beam, BeamSearch
from services.frontend.requests.ended import Tokens
from services.frontend.requests.generation import Client, generating
from services.frontend.requests.plan import GenerationPlan, Prompt, plan_request
from services.frontend.requests.schema import ChatCompletionRequest, GenerationRequest
from services.frontend.requests.unsupported import lost_to_beams
from services.frontend.workers.token_mailbox import Piece


def check_beams(request: GenerationRequest) -> None:
    """Raises ApiError (400) for more than can be searched for."""
    if (request.n or 1) > MAX_BEAMS:
        raise bad_request(f"At most {MAX_BEAMS} beams are possible, as `n`.", "n")
    if request.max_tokens == 0:
        raise bad_request("A beam search generates one token at least.", "max_tokens")
    if request.logprob_token_ids:  # type: ignore[union-attr]
        raise bad_request("A beam search takes no `logprob_token_ids`.", "logprob_token_ids")


class BeamExchange(ModelExchange):
    """Searches for the likeliest answers to each prompt."""

    async def _generate(self, sender: AnswerSender, scope: Scope) -> None:
        check_beams(self._request)
        service = self._service
        with service.media.held(service.clock() + self._left_s(), self._owner) as media:
            await self._search_with(media, sender, scope)

    async def _search_with(self, media: MediaLoader, sender: AnswerSender, scope: Scope) -> None:
        service = self._service
        request = msgspec.structs.replace(self._request, **dict.fromkeys(lost_to_beams(self._request)))
        plan = await plan_request(
            request, self.request_id, self._model, service.settings.max_choices, service.threads, media
        )
        client, found, cached_tokens = self._client(scope), list[Beam](), 0
        for number in range(len(plan.prompts)):
            beams, cached = await self._search(sender, plan, number, client)
            found += beams
            cached_tokens += cached
        shows_end = bool(request.include_stop_str_in_output)
        usage = _usage(plan.prompt_tokens, [_shown(beam, shows_end=shows_end) for beam in found], cached_tokens)
        self._progress.tokens = Tokens(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        metrics = service.metrics.of(self._model.engine_model)
        metrics.generated_tokens.inc(usage.completion_tokens)
        metrics.cached_tokens.inc(cached_tokens)
        source: PieceSource = _Found([_piece(request, plan, index, beam) for index, beam in enumerate(found)])
        if plan.read_by is not None:
            source = OutsidePieces(source, plan, self._left_s(), is_whole=not request.stream)
        form = answer_format(request, self._header(plan), plan)
        if request.stream:
            await sender.stream(source, form, (lambda: usage) if self._include_usage else None)
        else:
            await sender.whole(source, form, len(found), lambda: usage)

    async def _search(
        self, sender: AnswerSender, plan: GenerationPlan, number: int, client: Client
    ) -> tuple[list[Beam], int]:
        """The best beams of one prompt, and what of it was in the prefix cache. Raises ApiError."""
        prompt = plan.prompts[number]
        endings = frozenset[int]() if prompt.sampling.ignore_eos else self._model.text.eos_token_ids
        penalty = 1.0 if self._request.length_penalty is None else self._request.length_penalty
        search = BeamSearch(len(prompt.token_ids), plan.n, prompt.sampling.max_tokens, endings, penalty)
        step, cached_tokens = 0, 0
        while not search.is_done:
            request_id = f"{plan.request_id}.{number}.{step}" if number else f"{plan.request_id}.{step}"
            followers, found = await self._followers(sender, _step_plan(plan, number, search.beams, request_id), client)
            search.take(followers)
            cached_tokens = cached_tokens if step else found
            step += 1
        return search.best(), cached_tokens

    async def _followers(
        self, sender: AnswerSender, plan: GenerationPlan, client: Client
    ) -> tuple[list[list[tuple[int, float]]], int]:
        """The likeliest tokens behind each prompt of the plan, and what of the first one was in the prefix cache.
        Raises ApiError."""
        followers: list[list[tuple[int, float]]] = [[] for _ in plan.prompts]
        cached_tokens, left = 0, len(plan.prompts)
        async with generating(self._service, plan, self._arrived_s, client) as run:
            if not sender.headers.get(INSTANCE_HEADER):
                sender.headers[INSTANCE_HEADER] = run.generation.instance_ids[0]
                sender.headers[POLICY_HEADER] = run.generation.policies[0]
            while left:
                await run.generation.mailbox.wait()
                for piece in run.generation.mailbox.take():
                    for position in piece.logprobs:
                        followers[piece.index] = [(token.token_id, token.logprob) for token in position.top]
                    if piece.index == 0:
                        cached_tokens = piece.cached_tokens or cached_tokens
                    left -= bool(piece.finish_reason)
        return followers, cached_tokens


class _Found:
    """A `PieceSource` of which everything is there."""

    def __init__(self, pieces: Sequence[ChoicePiece]) -> None:
        self._pieces = pieces
        self._is_read = False

    @property
    def done(self) -> bool:
        return self._is_read

    def wait(self) -> Awaitable[None]:
        ready = asyncio.get_running_loop().create_future()
        ready.set_result(None)
        return ready

    def read(self) -> Sequence[ChoicePiece]:
        pieces = () if self._is_read else self._pieces
        self._is_read = True
        return pieces


def _step_plan(plan: GenerationPlan, number: int, beams: Sequence[Beam], request_id: str) -> GenerationPlan:
    """One token behind each beam of a prompt; under an id of its own, because the last step's requests may not have
    been forgotten everywhere."""
    whole = plan.prompts[number]
    sampling = request_pb2.SamplingParams()
    sampling.CopyFrom(whole.sampling)
    sampling.max_tokens, sampling.min_tokens, sampling.temperature, sampling.logprobs = 1, 0, 0.0, 2 * plan.n
    sampling.ClearField("prompt_logprobs")
    prompts = tuple(
        Prompt([*whole.token_ids, *beam.token_ids], sampling, media=_behind(whole.media, beam.token_ids))
        for beam in beams
    )
    return replace(plan, request_id=request_id, prompts=prompts, n=1, ticket=b"")


def _behind(media: request_pb2.PromptMedia | None, token_ids: Sequence[int]) -> request_pb2.PromptMedia | None:
    """The media of a prompt that has tokens behind it."""
    if media is None:
        return None
    rendered = [*media.template_token_ids, *token_ids]
    return request_pb2.PromptMedia(items=media.items, template_token_ids=rendered, spans=media.spans)


def _piece(request: GenerationRequest, plan: GenerationPlan, index: int, beam: Beam) -> ChoicePiece:
    finish = request_pb2.FINISH_REASON_STOP if beam.is_ended else request_pb2.FINISH_REASON_LENGTH
    shown = _shown(beam, shows_end=bool(request.include_stop_str_in_output))
    logprobs = [
        _position(token_id, rivals, most_rivals)
        for token_id, rivals in zip(shown, beam.rivals, strict=False)
        if (most_rivals := _rivals_wanted(request)) is not None
    ]
    piece = choice_text(request, plan, index).push(Piece(index, list(beam.token_ids), logprobs, finish, None))
    assert piece is not None, "an answer that has ended is shown"
    return replace(piece, stop_reason=beam.token_ids[-1]) if beam.is_ended else piece


def _shown(beam: Beam, *, shows_end: bool) -> Sequence[int]:
    """The tokens of an answer, which alone are told and counted, as in vLLM."""
    return beam.token_ids[:-1] if beam.is_ended and not shows_end else beam.token_ids


def _rivals_wanted(request: GenerationRequest) -> int | None:
    """The logprobs of so many of the likeliest tokens are told besides those of the answer's; None: none at all. Of a
    completion one more than it asks for, as in vLLM, which counts the answer's own among them."""
    if isinstance(request, ChatCompletionRequest):
        return request.top_logprobs or 0 if request.logprobs else None
    return None if request.logprobs is None else request.logprobs + 1


def _position(token_id: int, rivals: Sequence[tuple[int, float]], most_rivals: int) -> request_pb2.PositionLogprobs:
    ranked = [
        request_pb2.TokenLogprob(token_id=each, logprob=logprob, rank=rank)
        for rank, (each, logprob) in enumerate(rivals, 1)
    ]
    chosen = next(each for each in ranked if each.token_id == token_id)
    return request_pb2.PositionLogprobs(chosen=chosen, top=ranked[:most_rivals])


def _usage(prompt_tokens: int, answers: Sequence[Sequence[int]], cached_tokens: int) -> Usage:
    generated = sum(map(len, answers))
    return Usage(prompt_tokens, generated, prompt_tokens + generated, PromptTokensDetails(cached_tokens))
