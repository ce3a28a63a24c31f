"""One request's way up a cascade, as a state machine without I/O.

GENERATING --answered--> JUDGING --score met--> DONE
   ^  |                     |
   |  '--given up--.        |
   '---------------'--------'        a tier that fails is passed over; what cannot be improved in time is accepted

Tiers that accept no score are not asked as long as others can answer, and the answer of one that accepts every score is
not judged.

An answer is given up while it is being written once no score that it can still get meets the threshold. Then there is
none to fall back on, so a request with a deadline gives none up, and where all further tiers fail the highest tier that
was given up is asked once more, and its answer taken; where there is none either, the highest that was not asked.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from controlplane.model.cascade_record import MAX_SCORE
from controlplane.protocols.cascade.terms import CascadeTerms, WithoutJudge
from mesh.errors import IllegalTransition
from mesh.invariants import invariants


class WalkState(StrEnum):
    """Where the request stands."""

    GENERATING = "generating"
    """A tier is answering it."""
    JUDGING = "judging"
    """Its answer is being judged."""
    DONE = "done"
    """An answer was accepted."""
    FAILED = "failed"
    """No tier could answer."""


TRANSITIONS: dict[WalkState, frozenset[WalkState]] = {
    WalkState.GENERATING: frozenset({WalkState.GENERATING, WalkState.JUDGING, WalkState.DONE, WalkState.FAILED}),
    WalkState.JUDGING: frozenset({WalkState.GENERATING, WalkState.DONE}),
    WalkState.DONE: frozenset(),
    WalkState.FAILED: frozenset(),
}


class Because(StrEnum):
    """Why an answer was accepted; the client is told."""

    SCORE = "score"
    """It scored at least the threshold."""
    ACCEPTS_ALL = "accepts_all"
    """Its tier's threshold is 0, which every score meets: it was not judged."""
    LAST_TIER = "last_tier"
    """No further tier may be asked."""
    DEADLINE = "deadline"
    """No further tier is expected to answer in time: the best so far."""
    JUDGE_DOWN = "judge_down"
    """Nobody could judge it, and the terms say to take it then."""
    TIER_FAILED = "tier_failed"
    """The tiers above could not answer: the best so far."""


class Escalation(StrEnum):
    """Why a further tier is asked."""

    LOW_SCORE = "low_score"
    """The answer before it scored less than the threshold."""
    GIVEN_UP = "given_up"
    """The answer before it could not score the threshold any more, and was not written to its end."""
    NOT_JUDGED = "not_judged"
    """Nobody could judge the answer before it, and the terms say to go on then."""
    TIER_FAILED = "tier_failed"
    """The tier before it could not answer."""


@dataclass(frozen=True, slots=True)
class Generate:
    """Let this tier answer the request."""

    tier: int
    because: Escalation | None = None
    """None for the first tier that is asked."""


@dataclass(frozen=True, slots=True)
class Judge:
    """Have this tier's answer judged."""

    tier: int


@dataclass(frozen=True, slots=True)
class Accept:
    """Give the client this tier's answer."""

    tier: int
    because: Because

    @property
    def is_compromise(self) -> bool:
        """Whether the cascade would have gone on, had it been able to."""
        return self.because not in (Because.SCORE, Because.ACCEPTS_ALL, Because.LAST_TIER)


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell the client that no tier could answer."""

    reason: str


Action: TypeAlias = Generate | Judge | Accept | Fail


class CascadeWalk:
    """Events in, the one next action out. The first tier is asked whatever the deadline: some answer beats none."""

    def __init__(self, request_id: str, terms: CascadeTerms) -> None:
        self.terms = terms
        self.state = WalkState.GENERATING
        self.tier = terms.first_tier
        self.scores: dict[int, float] = {}
        """By tier, of the answers that were judged."""
        self._request_id = request_id
        self._answered: list[int] = []
        self._given_up: list[int] = []
        self._left_out = [tier for tier in range(terms.last_tier) if not terms.accepts_some(tier)]
        """Asked where all others fail: instances of a tier that a new plan wants may still be loading."""
        self._failures: list[str] = []
        self._is_falling_back = False

    @property
    def first(self) -> Generate:
        """What to begin with."""
        return Generate(self.terms.first_tier)

    @property
    def will_accept(self) -> Because | None:
        """Why the answer that is being written is the client's, whatever it will say. None: it may not be, or may be
        cut for one that is there already."""
        may_be_cut = self.terms.deadline_s is not None and bool(self._answered)
        return None if self.state is not WalkState.GENERATING or may_be_cut else self._unjudged

    @property
    def may_be_judged(self) -> bool:
        """Whether the answer that is being written may have to be judged."""
        return self.state is WalkState.GENERATING and self._unjudged is None

    @property
    def may_give_up(self) -> bool:
        """Whether the answer that is being written may be given up."""
        return self.may_be_judged and self.terms.deadline_s is None

    def gave_up(self, tier: int, score: float) -> Generate:
        """The tier's answer is not written to its end: `score` is the most that it could have got, and below the
        threshold."""
        self._expect(WalkState.GENERATING, tier, "been given up")
        if not self.may_give_up or not 0 <= score < self.terms.thresholds[tier]:
            raise IllegalTransition(f"{self._story()}: an answer that may score {score} was given up")
        self._given_up.append(tier)
        self.scores[tier] = score
        return self._generate(self._next(tier), Escalation.GIVEN_UP)

    def answered(self, tier: int, now_s: float) -> Action:
        """The tier's answer is complete."""
        self._expect(WalkState.GENERATING, tier, "answered")
        self._answered.append(tier)
        if self._unjudged is not None:
            return self._accept(tier, self._unjudged)
        if not self._fits(self._next(tier), now_s):
            return self._accept(self._best(), Because.DEADLINE)
        self._go(WalkState.JUDGING)
        return Judge(tier)

    def judged(self, tier: int, score: float, now_s: float) -> Action:
        """The judge's word on the tier's answer, 0 to 100."""
        self._expect(WalkState.JUDGING, tier, "judged")
        if not 0 <= score <= MAX_SCORE:
            raise IllegalTransition(f"{self._story()}: a score goes from 0 to {MAX_SCORE:g}, got {score}")
        self.scores[tier] = score
        if score >= self.terms.thresholds[tier]:
            return self._accept(tier, Because.SCORE)
        if not self._fits(self._next(tier), now_s):
            return self._accept(self._best(), Because.DEADLINE)
        return self._generate(self._next(tier), Escalation.LOW_SCORE)

    def not_judged(self, tier: int, now_s: float) -> Action:
        """No judge could be had for the tier's answer."""
        self._expect(WalkState.JUDGING, tier, "not judged")
        if self.terms.without_judge is WithoutJudge.ACCEPT:
            return self._accept(tier, Because.JUDGE_DOWN)
        if not self._fits(self._next(tier), now_s):
            return self._accept(self._best(), Because.DEADLINE)
        return self._generate(self._next(tier), Escalation.NOT_JUDGED)

    def failed(self, tier: int, reason: str, now_s: float) -> Action:
        """The tier could not answer: the next one may, else the best so far is taken, else what any can say."""
        self._expect(WalkState.GENERATING, tier, "failed")
        self._failures.append(f"tier {tier}: {reason}")
        goes_on = tier < self.terms.last_tier and not self._is_falling_back
        if goes_on and (not self._answered or self._fits(self._next(tier), now_s)):
            return self._generate(self._next(tier), Escalation.TIER_FAILED)
        if self._answered:
            return self._accept(self._best(), Because.TIER_FAILED)
        in_reserve = self._given_up or self._left_out
        if in_reserve:
            self._is_falling_back = True
            return self._generate(in_reserve.pop(), Escalation.TIER_FAILED)
        self._go(WalkState.FAILED)
        return Fail("; ".join(self._failures))

    def out_of_time(self) -> Accept | None:
        """The deadline has passed while a further tier was at work: the best so far; None: there is none yet, or the
        walk has ended."""
        if not self._answered or self.state in (WalkState.DONE, WalkState.FAILED):
            return None
        return self._accept(self._best(), Because.DEADLINE)

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`."""
        tiers = (*self._answered, *self._given_up, *self.scores, self.tier)
        assert all(0 <= tier <= self.terms.last_tier for tier in tiers), "no tier but those that may be asked"
        assert all(0 <= score <= MAX_SCORE for score in self.scores.values()), "scores go from 0 to 100"
        once = (*self._answered, *self._given_up)
        assert len(set(once)) == len(once), "a tier answers once, or is given up"
        if self.state is WalkState.JUDGING:
            assert self._answered[-1] == self.tier, "the answer that is judged is the last one"
        if self.state is WalkState.DONE:
            assert self._answered, "what is accepted is somebody's answer"
        if self.state is WalkState.FAILED:
            left = (*self._answered, *self._given_up, *self._left_out)
            assert not left, "it fails when nobody is left to ask"
        if self._given_up:
            assert self.terms.deadline_s is None, "with a deadline no answer is given up"
        if self._is_falling_back and self.state is not WalkState.DONE:
            assert not self._answered, "what was given up is asked again where there is no answer"

    @property
    def _unjudged(self) -> Because | None:
        """Why the tier's answer is accepted without a judge; None: it is not."""
        if self._is_falling_back:
            return Because.TIER_FAILED
        if self.tier == self.terms.last_tier:
            return Because.LAST_TIER
        return Because.ACCEPTS_ALL if self.terms.accepts_all(self.tier) else None

    def _next(self, tier: int) -> int:
        """The next tier that may be asked and of which some answer would be accepted."""
        return next(above for above in range(tier + 1, self.terms.last_tier + 1) if self.terms.accepts_some(above))

    def _fits(self, tier: int, now_s: float) -> bool:
        deadline_s = self.terms.deadline_s
        return deadline_s is None or now_s + self.terms.expected_s[tier] <= deadline_s

    def _best(self) -> int:
        """The answer with the highest score. All that were scored were found wanting, so one that never was counts as
        what its tier asks for; of equals the highest tier's, which is meant to be better."""
        asked_for = (*self.terms.thresholds, MAX_SCORE)
        return max(self._answered, key=lambda tier: (self.scores.get(tier, asked_for[tier]), tier))

    def _generate(self, tier: int, because: Escalation) -> Generate:
        self._go(WalkState.GENERATING)
        self.tier = tier
        return Generate(tier, because)

    def _accept(self, tier: int, because: Because) -> Accept:
        self._go(WalkState.DONE)
        return Accept(tier, because)

    def _go(self, state: WalkState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"{self._story()} cannot become {state}")
        self.state = state

    def _expect(self, state: WalkState, tier: int, event: str) -> None:
        if self.state is not state or self.tier != tier:
            raise IllegalTransition(f"{self._story()} does not await that tier {tier} has {event}")

    def _story(self) -> str:
        return (
            f"request {self._request_id}, {self.state} on tier {self.tier}, answered by {self._answered}, given up "
            f"{self._given_up}, scored {self.scores}, failed {self._failures}"
        )
