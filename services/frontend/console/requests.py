"""Requests that run and have ended, where they were placed and why, and the story of one of them. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

import msgspec

from penstock.v1 import frontend_pb2, scheduler_pb2
from services.frontend.console.collector import Look, Unanswered
from services.frontend.console.state import MoveRow, Option, PlacementRow, RequestRow
from services.frontend.console.window import EndedAt, tpot_ms, ttft_ms

SHOWN_RUNNING: Final = 100
SHOWN_ENDED: Final = 50
SHOWN_PLACEMENTS: Final = 20


def request_rows(look: Look, ended: Sequence[EndedAt]) -> tuple[RequestRow, ...]:
    """Those that run, oldest first, then those that ended last."""
    running = [
        _running(frontend, request)
        for frontend, answer in look.running.items()
        if not isinstance(answer, Unanswered)
        for request in answer.requests
    ]
    running.sort(key=lambda row: -row.age_ms)
    return (*running[:SHOWN_RUNNING], *(_ended(each) for each in islice(reversed(ended), SHOWN_ENDED)))


def _running(frontend: str, request: frontend_pb2.FrontendRequest) -> RequestRow:
    return RequestRow(
        request_id=request.request_id,
        model=request.model,
        frontend=frontend,
        owner=request.owner,
        instance=request.instance_id,
        status=0,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=0,
        generated_tokens=request.generated_tokens,
        age_ms=request.age_ms,
        ttft_ms=None,
        tpot_ms=None,
        moves=0,
        recoveries=0,
        tier="",
    )


def _ended(each: EndedAt) -> RequestRow:
    request = each.request
    first, between = ttft_ms(request), tpot_ms(request)
    return RequestRow(
        request_id=request.request_id,
        model=request.model,
        frontend=each.frontend,
        owner=request.owner,
        instance=request.last_instance_id,
        status=request.status,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        generated_tokens=request.generated_tokens,
        age_ms=round(request.ended_ms, 1),
        ttft_ms=None if first is None else round(first, 1),
        tpot_ms=None if between is None else round(between, 2),
        moves=request.moves,
        recoveries=request.recoveries,
        tier=request.tier,
    )


def placement_rows(look: Look) -> tuple[PlacementRow, ...]:
    """The last ones of all schedulers, latest first."""
    rows = [
        placement_row(scheduler, each.explanation, each.instances, each.excluded)
        for scheduler, answer in sorted(look.placements.items())
        if not isinstance(answer, Unanswered)
        for each in answer.placements
    ]
    return tuple(sorted(rows, key=lambda row: -row.at_unix_ms)[:SHOWN_PLACEMENTS])


def placement_row(
    scheduler: str, explanation: scheduler_pb2.ExplainResponse, instances: int, excluded: int
) -> PlacementRow:
    """One placement with the options that its explanation has, best first."""
    options = sorted(
        _options(explanation), key=lambda option: (bool(option.excluded), option.score, not option.is_chosen)
    )
    return PlacementRow(
        request_id=explanation.request_id,
        at_unix_ms=explanation.placed_unix_ms,
        scheduler=scheduler,
        policy=explanation.policy,
        rule=explanation.rule,
        prompt_tokens=explanation.prompt_tokens,
        chosen=explanation.chosen_instance_id,
        decoded_by=explanation.decode_instance_id
        if explanation.decode_instance_id != explanation.chosen_instance_id
        else "",
        decode_rule=explanation.decode_rule,
        pull=_pull(explanation.pull) if explanation.HasField("pull") else "",
        options=tuple(options),
        instances=instances,
        excluded=excluded,
    )


def _pull(pull: scheduler_pb2.PulledPrefix) -> str:
    times = f"{pull.pull_ms:.3g} ms instead of {pull.compute_ms:.3g} ms"
    how = f"loaded {pull.loads_tokens:,} of them from the memory of its host" if pull.loads_tokens else "computed them"
    comes = f" once it has {how}, in some {pull.comes_ms:.3g} ms" if pull.comes_ms else ""
    return f"pulls {pull.tokens:,} tokens from {pull.instance_id}{comes}: {times}"


def _options(explanation: scheduler_pb2.ExplainResponse) -> Iterator[Option]:
    for each in explanation.scores:
        yield Option(
            instance_id=each.instance_id,
            score=round(each.score, 3),
            parts={name: round(value, 3) for name, value in sorted(each.indicators.items())},
            is_chosen=each.instance_id == explanation.chosen_instance_id,
            excluded=each.excluded,
        )


class Span(msgspec.Struct, frozen=True):
    """A bar of the waterfall, in milliseconds from the request's arrival."""

    name: str
    start_ms: float
    end_ms: float
    detail: str = ""
    is_bad: bool = False


class Story(msgspec.Struct, frozen=True):
    """All that the mesh remembers of one request."""

    request_id: str
    frontend: str
    model: str
    status: int
    """0: it runs."""
    arrived_unix_ms: int
    total_ms: float
    summary: RequestRow | None
    spans: tuple[Span, ...]
    placement: PlacementRow | None
    moves: tuple[MoveRow, ...]
    missing: tuple[str, ...]
    """Who did not answer, and what is not remembered any more."""


def spans(request: frontend_pb2.EndedRequest, moves: Iterable[MoveRow]) -> tuple[Span, ...]:
    """What a request that has ended spent its time on, in the order of their beginnings."""
    end_ms = request.ended_ms
    admitted_ms = request.admitted_ms if request.HasField("admitted_ms") else end_ms
    found = [
        Span(
            "admission", 0.0, admitted_ms, "key, limits and the queue of the frontend", _failed(request, "admitted_ms")
        )
    ]
    if request.tiers:
        found += _tier_spans(request, admitted_ms)
    elif request.HasField("admitted_ms"):
        placed_ms = request.placed_ms if request.HasField("placed_ms") else end_ms
        detail = "chat template, tokens, the scheduler's choice"
        found.append(Span("placement", admitted_ms, placed_ms, detail, _failed(request, "placed_ms")))
        if request.HasField("placed_ms"):
            first_ms = request.first_token_ms if request.HasField("first_token_ms") else end_ms
            computed = request.prompt_tokens - request.cached_tokens
            detail = f"{computed} of {request.prompt_tokens} prompt tokens computed on {request.instance_id}"
            found.append(Span("prefill", placed_ms, first_ms, detail, _failed(request, "first_token_ms")))
        if request.HasField("first_token_ms"):
            detail = f"{request.generated_tokens} tokens; ended on {request.last_instance_id}"
            found.append(Span("decode", request.first_token_ms, end_ms, detail, request.status != 200))
    for move in moves:
        start_ms = max(0.0, float(move.at_unix_ms - request.arrived_unix_ms))
        detail = f"{move.source} to {move.target}: {move.outcome}, paused {move.paused_ms:g} ms; {move.reason}"
        found.append(Span("move", start_ms, start_ms + move.duration_ms, detail, move.outcome == "stayed"))
    return tuple(sorted(found, key=lambda span: span.start_ms))


def _tier_spans(request: frontend_pb2.EndedRequest, start_ms: float) -> Iterator[Span]:
    """Tiers answer in turn; a judgement's time is the gap behind an answer."""
    for tier in request.tiers:
        end_ms = start_ms + (1000 * tier.seconds if tier.HasField("seconds") else 0.0)
        score = f"scored {tier.score:.1f}" if tier.HasField("score") else "not judged"
        yield Span(f"tier {tier.model}", start_ms, end_ms, tier.failure or score, bool(tier.failure))
        start_ms = end_ms


def _failed(request: frontend_pb2.EndedRequest, ended_by: str) -> bool:
    return request.status != 200 and not request.HasField(ended_by)


def story(
    request_id: str,
    ended: Mapping[str, frontend_pb2.EndedRequest],
    running: Mapping[str, frontend_pb2.FrontendRequest],
    explained: Mapping[str, scheduler_pb2.ExplainResponse],
    moves: Sequence[MoveRow],
    missing: Sequence[str],
    now_unix_ms: int,
) -> Story | None:
    """What frontends and schedulers, by name, know of it; None if nobody knows it."""
    placement = None
    placed = {name: answer for name, answer in explained.items() if answer.chosen_instance_id}
    if placed:
        scheduler = max(placed, key=lambda name: placed[name].placed_unix_ms)
        explanation = placed[scheduler]
        placement = placement_row(
            scheduler, explanation, len(explanation.scores), sum(bool(each.excluded) for each in explanation.scores)
        )
    if ended:
        frontend = max(ended, key=lambda name: ended[name].arrived_unix_ms + ended[name].ended_ms)
        request = ended[frontend]
        return Story(
            request_id,
            frontend,
            request.model,
            request.status,
            request.arrived_unix_ms,
            round(request.ended_ms, 2),
            _ended(EndedAt(frontend, request)),
            spans(request, moves),
            placement,
            tuple(moves),
            tuple(missing),
        )
    if not running and placement is None:
        return None
    for frontend, request_now in running.items():
        age_ms = float(request_now.age_ms)
        going = Span("so far", 0.0, age_ms, f"{request_now.generated_tokens} tokens on {request_now.instance_id}")
        return Story(
            request_id,
            frontend,
            request_now.model,
            0,
            now_unix_ms - request_now.age_ms,
            age_ms,
            _running(frontend, request_now),
            (going,),
            placement,
            tuple(moves),
            tuple(missing),
        )
    forgotten = (*missing, "no frontend remembers the request; a scheduler remembers its placement")
    assert placement is not None, "somebody knows it"
    return Story(request_id, "", "", 0, placement.at_unix_ms, 0.0, None, (), placement, tuple(moves), forgotten)
