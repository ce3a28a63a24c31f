"""Placement by the milliseconds that a choice adds to everybody."""

from typing import ClassVar, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.model.placement import Decision, DecodeChoice, DeferredIndicators, PlacementProblem
from controlplane.model.prompt_prices import PriceRow
from controlplane.model.step_costs import CostRow
from controlplane.policies import phases
from controlplane.policies.kv_options import (
    Milliseconds,
    PrefillWays,
    PrefixSource,
    PullLinks,
    awaited_source,
    held_tokens,
    hosted_source,
    longest_sources,
    pull_ms,
    step_costs,
)
from controlplane.policies.parameters import PolicyParameters
from controlplane.policies.prefill_shares import LEAST_GAIN, PrefillShares
from controlplane.policies.prompts_to_come import PromptsToCome, prompt_work_ms
from controlplane.policies.selection import RoundRobinCounter, among_candidates, lowest

_ARRAYS_KEPT: Final = 12
"""Of the size of the scores, in what an explanation is worked out from."""
_NOBODY: Final = (None, None)


class Penstock:
    """score = milliseconds that the choice adds to the end-to-end latency of this request and of all others there,
    lowest wins.

    On each instance the prompt's KV is got in the cheapest of the ways that there are: computed, loaded from the host's
    memory, pulled from the instance that has most of it, from one that is going to have more as soon as it has, or from
    one whose host has more (`kv_options`). Blocks that are to come count as cached where they come, and the wait for
    them is that for the prompts before this one. The answer is taken to be of the usual length, the batch to stay as it
    is, and as many prompts to come there as have come of late (`prompts_to_come`).

    Where the costs of all instances were measured, a request may be decoded elsewhere than its prompt is computed
    (`prefill_shares`).

    Nothing is set by hand: what steps cost comes from each instance's profile, or a data sheet where there is none,
    what KV costs to bring is measured, and the usual length of an answer is what this model's answers have had of late.

    Rejected: what those yet to come will wait, at the rate of arrivals (who comes can be placed elsewhere; over 44 rows
    of trace and load the greatest regret grew from 7 to 30 %); a price on evicting what others may ask for again
    (36 %); weights of the parts (0.7 and 1.4 made no difference that stood out of the noise); LMetric's product once
    everything is saturated (at 1.2 and 1.6 times the sustained rate this sum was the better one in all ten rows tried).
    """

    name: ClassVar[str] = "penstock"
    rule: ClassVar[str] = (
        "score = ms added to everybody = wait for the prompts there, or for the KV that is brought + own prefill + "
        "answer beside that batch and the prompts to come + what its prompt and context slow down the others there"
    )
    parameters = PolicyParameters()

    def __init__(self) -> None:
        self._turns = RoundRobinCounter()
        self._links = PullLinks()
        self._prefills = PrefillShares()
        self._to_come = PromptsToCome()

    def decide(self, problem: PlacementProblem) -> Decision:
        snapshot, request, candidates = problem.snapshot, problem.request, problem.candidates
        ways = PrefillWays.of(problem, self._sources(problem))
        # Who may be decoded elsewhere is not held up by the prompts that come here.
        moves = problem.is_decode_chosen_later and snapshot.is_profiled and not snapshot.is_restricted
        answer = _Answer.of(problem, None if moves else self._to_come.slowdown(problem))
        scores = ways.total + answer.total
        if candidates is not snapshot.placeable or snapshot.placeable_instances < len(snapshot):
            scores = among_candidates(scores, candidates)
        row = lowest(scores, self._turns.next(request.model))
        cached, pair_ms = problem.cached_tokens, step_costs(snapshot)[CostRow.ATTENDED_PAIR]
        indicators = DeferredIndicators(
            lambda: _indicators(cached, pair_ms, ways, answer), _ARRAYS_KEPT * scores.nbytes
        )
        source = ways.source_of(row)
        loaded_tokens = 0 if problem.host_tokens is None else int(problem.host_tokens[row])
        had_tokens = max(int(cached[row]), 0 if source is None else source.tokens, loaded_tokens)
        work_ms = prompt_work_ms(problem, row, had_tokens)
        self._to_come.placed(problem, row, work_ms)
        stays = self._stays(problem, row, had_tokens, work_ms)
        if source is None:
            return Decision(row, scores, indicators, stays=stays, pull_row=-1)
        begins_s, pulled_ms = request.now_s + source.comes_ms / 1000, pull_ms(problem, source, row)
        self._links.pulled(snapshot.instances[source.row].instance_id, begins_s, pulled_ms)
        return Decision(
            row,
            scores,
            indicators,
            stays=stays,
            pull_row=source.row,
            pull_tokens=source.tokens,
            pull_comes_ms=source.comes_ms,
            pull_loads_tokens=source.loads_tokens,
        )

    def decide_decode(self, problem: PlacementProblem, prefill_row: int) -> DecodeChoice:
        """See `LateDecider`."""
        snapshot = problem.snapshot
        if snapshot.is_profiled and not snapshot.is_restricted:
            return self._prefills.decode(problem, prefill_row)
        stays = Decision(prefill_row, np.zeros(len(snapshot)))
        return phases.choose_decode(problem, stays) or DecodeChoice(prefill_row, phases.STAYS)

    def _stays(self, problem: PlacementProblem, row: int, had_tokens: int, work_ms: float) -> bool:
        """Whether it is known already that the request will be decoded where it is prefilled."""
        if not problem.snapshot.is_profiled:
            return True
        share = self._prefills.placed(problem, row, had_tokens, work_ms)
        return problem.snapshot.is_restricted or share < LEAST_GAIN

    def _sources(self, problem: PlacementProblem) -> tuple[PrefixSource, ...]:
        """Of the instances with the longest prefix the one that is through with earlier pulls first; one that is going
        to have more; and one whose host has more."""
        rows, coming = longest_sources(problem), (awaited_source(problem), hosted_source(problem))
        if not rows and coming == _NOBODY:
            return ()
        instances, now_s = problem.snapshot.instances, problem.request.now_s
        sources: tuple[PrefixSource, ...] = ()
        if rows:
            busy_ms, row = min([(self._links.busy_ms(instances[row].instance_id, now_s), row) for row in rows])
            sources = (PrefixSource(row, held_tokens(problem, row), busy_ms),)
        for source in coming:
            if source is not None:
                busy_ms = self._links.busy_ms(instances[source.row].instance_id, now_s)
                sources = (*sources, msgspec.structs.replace(source, busy_ms=busy_ms))
        return sources


class _Answer(msgspec.Struct, frozen=True, eq=False):
    """What the request's answer costs on each instance."""

    total: Milliseconds
    """To everybody."""
    batch: NDArray[np.float64]
    other_ms: Milliseconds | float
    """Of it, what each request there pays for steps that are longer by this one's context."""
    recomputed: Milliseconds | float
    """Of it, what does not fit into the KV memory and has to be computed again, by everybody."""

    @classmethod
    def of(cls, problem: PlacementProblem, slowdown: Milliseconds | None) -> "_Answer":
        """`slowdown`: of the answer, by the prompts that come there; None: it may be decoded elsewhere."""
        snapshot, prompt_tokens = problem.snapshot, problem.request.prompt_tokens
        fixed, token, per_request, context, _ = step_costs(snapshot)
        answer_tokens = 0.0 if problem.request.max_tokens == 1 else snapshot.answer_tokens
        other_ms = (context * prompt_tokens + per_request) * answer_tokens
        batch, held = snapshot.prices[PriceRow.BATCH], snapshot.prices[PriceRow.HELD_TOKENS]
        total = (context * answer_tokens) * held
        total += (per_request * answer_tokens + (other_ms if slowdown is None else 0.0)) * batch
        total += (fixed + per_request + context * prompt_tokens) * answer_tokens
        if slowdown is not None:
            total += total * slowdown
            total += other_ms * batch
        recomputed: Milliseconds | float = 0.0
        if held[held.argmax()] + prompt_tokens > snapshot.least_kv_tokens:
            overflow = held + (prompt_tokens - snapshot.kv_blocks_total * snapshot.block_tokens)
            recomputed = np.maximum(overflow, 0) * token * (batch + 1)
            total += recomputed
        return cls(total, batch, other_ms, recomputed)


def _indicators(
    cached_tokens: NDArray[np.int64], pair_ms: Milliseconds | float, ways: PrefillWays, answer: _Answer
) -> dict[str, NDArray[np.int64]]:
    """For `explain`: what the score is the sum of and, where there is a choice, what it would be by each way to get the
    KV; -1 where that cannot be gone."""
    begin, new = ways.begin_and_new()
    prefill = ways.own(new, pair_ms)
    for_others = answer.other_ms * answer.batch + answer.recomputed
    named = {
        "wait_ms": begin,
        "prefill_ms": prefill,
        "decode_ms": answer.total - for_others,
        "others_ms": ways.total - begin - prefill + for_others,
    }
    for name, total in ways.named_totals().items():
        named[f"{name}_ms"] = np.where(np.isfinite(total), total + answer.total, -1)
    return {**{name: part.astype(np.int64) for name, part in named.items()}, "cached_tokens": cached_tokens}
