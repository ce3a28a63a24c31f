"""Where decoding is disturbed by prompts, and where it would not be: who decodes a request once its prompt is computed.

A step that computes a piece of a prompt is many times as long as one that only decodes, so who decodes beside prompts
waits for them. Once some instances compute most of the prompts, requests are decoded sooner on the others; and as
prompts go where they slow down few, the ones that decode little get more of them. So prefill and decode part by
themselves, as far as that pays and no further, with no pools, no thresholds and no SLO to set (Arrow, section 5, has
pools, and moves instances between them by both SLOs).

Whether it pays is what `PrefillShares.decode` adds up in milliseconds: the answer's decode beside the prompts that will
come, judged by those of late, on the instance of the prefill and on every other one, and what moving its KV takes; and
the KV that the copy displaces, which somebody computes again if prefixes are reused here. Without that last part coding
agents, who find three of four tokens cached, waited 23 % longer near what is sustained, and with it no longer.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from controlplane.model.instance import InstanceDescription
from controlplane.model.kv_costs import NO_KV_COSTS, datasheet_kv_costs
from controlplane.model.placement import DecodeChoice, PlacementProblem
from controlplane.model.prompt_prices import PriceRow
from controlplane.model.snapshot import Snapshot
from controlplane.policies.kv_options import Milliseconds, finite_or_none, kv_costs, step_costs
from controlplane.policies.selection import MAX_MODELS, among_candidates

LEAST_GAIN: Final = 0.05
"""Of the time of a decode: for less nothing is moved, and of an instance with less of prefill nobody is asked."""
REMEMBERED_ANSWERS: Final = 3.0
"""Prompts are remembered for as long as so many usual answers take: who decodes there next meets about as many."""
LEAST_REMEMBERED_S: Final = 0.5
MOST_SHARE: Final = 0.95
FORGOTTEN_A_PROMPT: Final = 0.002
"""Of how much of prompts was cached: what 500 prompts say counts."""
GUESSED_PULLS: Final = datasheet_kv_costs(0, pulls=True, loads=False).pull_token_ms or 0.0
RULE: Final = (
    "score = ms of the answer beside the prompts that come there + what its context slows down the others + moving its "
    "KV and what that displaces; it stays for a gain below 5 %"
)


class _Prompts:
    """What one model's instances have had to prefill of late. Arrays are in the order of `instances`."""

    def __init__(self, instances: tuple[InstanceDescription, ...], now_s: float) -> None:
        self.instances = instances
        self.shares = np.zeros(len(instances))
        """Of the time of each, as of `at_s`."""
        self.at_s = now_s
        self.cached_tokens = 0.0
        self.prompt_tokens = 0.0
        self._costs: NDArray[np.float64] | None = None
        self._mean_costs: Sequence[float] = ()

    def follow(self, instances: tuple[InstanceDescription, ...]) -> None:
        """Some have come or gone."""
        if instances is not self.instances:
            known = {each.instance_id: share for each, share in zip(self.instances, self.shares.tolist(), strict=True)}
            self.shares = np.array([known.get(each.instance_id, 0.0) for each in instances])
            self.instances = instances

    def mean_costs(self, snapshot: Snapshot) -> Sequence[float]:
        """Of the instances, row by row of `Snapshot.costs`; worked out when these change."""
        if self._costs is not snapshot.costs:
            self._costs, self._mean_costs = snapshot.costs, snapshot.costs.mean(axis=1).tolist()
        return self._mean_costs


class PrefillShares:
    """The share of its time that each instance spends on prompts, by what was placed there of late, as far as this
    scheduler knows."""

    def __init__(self) -> None:
        self._models: dict[str, _Prompts] = {}

    def placed(self, problem: PlacementProblem, row: int, had_tokens: int, work_ms: float) -> float:
        """A prompt goes to the instance in that row, which need not compute `had_tokens` of it and has `work_ms` to
        compute (`prompt_work_ms`). Returns the share of prefill there without it."""
        snapshot, request = problem.snapshot, problem.request
        prompts = self._prompts_of(snapshot, request.now_s)
        memory_s = _memory_s(snapshot, prompts.mean_costs(snapshot))
        prompts.shares *= np.exp((prompts.at_s - request.now_s) / memory_s)
        prompts.at_s = request.now_s
        before = float(prompts.shares[row])
        prompts.shares[row] += work_ms / 1000 / memory_s
        prompts.cached_tokens += min(had_tokens, request.prompt_tokens) - FORGOTTEN_A_PROMPT * prompts.cached_tokens
        prompts.prompt_tokens += request.prompt_tokens - FORGOTTEN_A_PROMPT * prompts.prompt_tokens
        return before

    def decode(self, problem: PlacementProblem, prefill_row: int) -> DecodeChoice:
        """Where a request is decoded whose prompt is computed in that row: there, unless another one is that much
        better. From an instance that is no candidate nothing can be moved either."""
        candidates = problem.candidates if problem.decode_candidates is None else problem.decode_candidates
        scores = among_candidates(self._scores(problem, prefill_row), candidates)
        row = int(scores.argmin())
        moves = candidates[prefill_row] and scores[row] < (1 - LEAST_GAIN) * scores[prefill_row]
        return DecodeChoice(row if moves else prefill_row, RULE, scores)

    def _scores(self, problem: PlacementProblem, prefill_row: int) -> Milliseconds:
        snapshot, tokens = problem.snapshot, problem.request.prompt_tokens
        prompts = self._prompts_of(snapshot, problem.request.now_s)
        fixed, token, per_request, context, _ = step_costs(snapshot)
        answer_tokens = snapshot.answer_tokens
        batch = snapshot.prices[PriceRow.BATCH] + snapshot.unreported_decodes
        held = snapshot.prices[PriceRow.HELD_TOKENS] + snapshot.unreported_decode_tokens
        batch[prefill_row] = max(batch[prefill_row] - 1, 0)  # which is itself
        held[prefill_row] = max(held[prefill_row] - tokens, 0)
        step = fixed + per_request * (batch + 1) + context * (held + tokens)
        # In that share of its time it computes a chunk with every token, and makes the fewer tokens.
        shares = np.minimum(prompts.shares, MOST_SHARE)
        pace = 1 / (1 - shares + shares * step / (step + token * snapshot.step_tokens))
        scores: Milliseconds = answer_tokens * (step + (context * tokens + per_request) * batch) * pace
        kv_tokens = snapshot.kv_blocks_total * snapshot.block_tokens
        scores += np.maximum(held + tokens - kv_tokens, 0) * token * (batch + 1)
        stays = scores[prefill_row]
        scores += self._move_ms(snapshot, prompts, tokens)
        scores[prefill_row] = stays
        return scores

    def _move_ms(self, snapshot: Snapshot, prompts: _Prompts, tokens: int) -> Milliseconds | float:
        """To copy the KV, and to get again what it displaces: a token that was computed has been found in a cache so
        many times before it was evicted as cached tokens come to one that is not."""
        pull_fixed, pull_token, _, load_token = kv_costs(snapshot)
        token_ms = finite_or_none(pull_token)
        copy_ms = np.where(
            token_ms > 0, pull_fixed + token_ms * tokens, NO_KV_COSTS.pull_fixed_ms + GUESSED_PULLS * tokens
        )
        again_ms = finite_or_none(load_token)
        again_ms = np.where(again_ms > 0, again_ms, step_costs(snapshot)[1])
        computed_tokens = max(prompts.prompt_tokens - prompts.cached_tokens, 1.0)
        move_ms: Milliseconds = copy_ms + again_ms * (tokens * prompts.cached_tokens / computed_tokens)
        return move_ms

    def _prompts_of(self, snapshot: Snapshot, now_s: float) -> _Prompts:
        prompts = self._models.get(snapshot.model)
        if prompts is None:
            if len(self._models) >= MAX_MODELS:
                del self._models[next(iter(self._models))]
            prompts = self._models[snapshot.model] = _Prompts(snapshot.instances, now_s)
        prompts.follow(snapshot.instances)
        return prompts


def _memory_s(snapshot: Snapshot, costs: Sequence[float]) -> float:
    """`costs`: the means over the instances of the rows of `Snapshot.costs`."""
    fixed, _, per_request, context, _ = costs
    instances = len(snapshot.instances)
    batch, held = snapshot.batch_total / instances, snapshot.held_tokens_total / instances
    answer_ms = snapshot.answer_tokens * (fixed + per_request * batch + context * held)
    return max(LEAST_REMEMBERED_S, REMEMBERED_ANSWERS * answer_ms / 1000)
