"""Disaggregation with a fixed split of the instances: what Arrow is compared with (Arrow, section 7.3)."""

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from controlplane.model.instance import InstancePhase
from controlplane.model.placement import Decision, DecodeChoice, PlacementProblem
from controlplane.model.snapshot import Snapshot
from controlplane.policies.arrow.parameters import StaticParameters
from controlplane.policies.arrow.policy import own_prefill_ms
from controlplane.policies.arrow.prefill_queues import PrefillQueues
from controlplane.policies.indicators import uncached_tokens
from controlplane.policies.selection import RoundRobinCounter, among_candidates, lowest


def prefill_rows(snapshot: Snapshot, prefill_instances: int) -> NDArray[np.bool_]:
    """The instances that prefill; all others decode. A single instance does both.

    Where operators have set instances aside for one phase that stands; of the rest the first ones prefill.
    """
    wanted = prefill_instances or -(-len(snapshot) // 2)
    pinned = np.fromiter((i.phase is InstancePhase.PREFILL for i in snapshot.instances), np.bool_, len(snapshot))
    free = np.flatnonzero(snapshot.prefill_rows & snapshot.decode_rows)
    rows = pinned.copy()
    rows[free[: max(min(wanted, len(snapshot) - 1) - int(pinned.sum()), 0)]] = True
    return rows if len(snapshot) > 1 else np.ones(1, np.bool_)


class StaticMinimalLoad:
    """A `LateDecider`: Arrow's request scheduling (least prefill delay, fewest running tokens) without its instance
    scheduling."""

    name: ClassVar[str] = "static_pd"
    rule: ClassVar[str] = "fixed split; prefill: least predicted prefill delay, decode: fewest running tokens"

    def __init__(self, parameters: StaticParameters) -> None:
        self.parameters = parameters
        self._queues = PrefillQueues(parameters.curve)
        self._turns = RoundRobinCounter()

    def decide(self, problem: PlacementProblem) -> Decision:
        turn = self._turns.next(problem.request.model)
        prefills = prefill_rows(problem.snapshot, self.parameters.prefill_instances)
        delay_ms = self._queues.delays_ms(problem.snapshot)
        wanted = ~prefills if problem.request.is_decoding else prefills
        rows = problem.candidates & wanted if (problem.candidates & wanted).any() else problem.candidates
        scores = among_candidates(delay_ms + own_prefill_ms(problem, self.parameters.curve), problem.candidates)
        row = lowest(among_candidates(delay_ms, rows), turn, tie_break=-problem.cached_tokens)
        self._queues.add(problem, row, int(uncached_tokens(problem)[row]))
        indicators = {"prefill_delay_ms": np.rint(delay_ms).astype(np.int64), "running_tokens": _tokens(problem)}
        if problem.request.is_decoding or problem.decode_candidates is None or problem.is_decode_chosen_later:
            return Decision(row, scores, indicators)
        choice = self.decide_decode(problem, row)
        return Decision(row, scores, indicators, choice.row, choice.scores)

    def decide_decode(self, problem: PlacementProblem, prefill_row: int) -> DecodeChoice:
        rows = ~prefill_rows(problem.snapshot, self.parameters.prefill_instances)
        rows &= problem.candidates if problem.decode_candidates is None else problem.decode_candidates
        if not rows.any():
            return DecodeChoice(prefill_row, self.rule)
        scores = among_candidates(_tokens(problem), rows)
        turn = self._turns.last(problem.request.model)
        return DecodeChoice(lowest(scores, turn), self.rule, scores)


class StaticRoundRobin:
    """A `LateDecider` that deals out prefills and decodes in turn, each over the instances set aside for it."""

    name: ClassVar[str] = "static_pd_round_robin"
    rule: ClassVar[str] = "fixed split; prefill and decode instances each in turn"

    def __init__(self, parameters: StaticParameters) -> None:
        self.parameters = parameters
        self._prefill_turns = RoundRobinCounter()
        self._decode_turns = RoundRobinCounter()

    def decide(self, problem: PlacementProblem) -> Decision:
        prefills = prefill_rows(problem.snapshot, self.parameters.prefill_instances)
        if problem.request.is_decoding:
            return self._go_on(problem, ~prefills)
        turn = self._prefill_turns.next(problem.request.model) - 1
        scores = self._in_turn(problem.candidates & prefills, problem.candidates, turn)
        row = int(scores.argmin())
        if problem.decode_candidates is None or problem.is_decode_chosen_later:
            return Decision(row, scores)
        choice = self.decide_decode(problem, row)
        return Decision(row, scores, {}, choice.row, choice.scores)

    def decide_decode(self, problem: PlacementProblem, prefill_row: int) -> DecodeChoice:
        rows = ~prefill_rows(problem.snapshot, self.parameters.prefill_instances)
        rows &= problem.candidates if problem.decode_candidates is None else problem.decode_candidates
        if not rows.any():
            return DecodeChoice(prefill_row, self.rule)
        scores = self._in_turn(rows, rows, self._decode_turns.next(problem.request.model) - 1)
        return DecodeChoice(int(scores.argmin()), self.rule, scores)

    def _go_on(self, problem: PlacementProblem, decodes: NDArray[np.bool_]) -> Decision:
        turn = self._decode_turns.next(problem.request.model) - 1
        scores = self._in_turn(problem.candidates & decodes, problem.candidates, turn)
        return Decision(int(scores.argmin()), scores)

    @staticmethod
    def _in_turn(rows: NDArray[np.bool_], otherwise: NDArray[np.bool_], turn: int) -> NDArray[np.float64]:
        """How many come before each; infinite where a request may not go."""
        chosen = rows if rows.any() else otherwise
        places = np.flatnonzero(chosen)
        scores = np.full(len(chosen), np.inf)
        scores[places] = (np.arange(len(places)) - turn) % len(places)
        return scores


def _tokens(problem: PlacementProblem) -> NDArray[np.int64]:
    tokens: NDArray[np.int64] = problem.snapshot.running_tokens + problem.snapshot.unreported_decode_tokens
    return tokens
