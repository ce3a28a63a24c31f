"""One request's way through a cascade of models: who answers it, who is judged, which answer is accepted. Pure; time is
an argument.

    NEW --begin--> GENERATING --answered--> JUDGING --judged: score met--> DONE
                      ^  |                     |
                      |  '--early exit--.      |
                      '-----------------'------'    a tier that fails is passed over

An answer is accepted without a judge where every score would do (the last tier, or a threshold of 0), and the best so
far where nothing better can be had in time. Tiers that accept no score are not asked as long as others can answer.

Early exit: an answer is ended while it is being written once no score that it can still get meets the threshold. Then
there is none to fall back on, so a request with a deadline never exits early. Where all further tiers fail, the highest
tier whose answer was ended is asked once more and its answer taken; without one, the highest tier that was not asked;
without one, the highest that failed and has an instance by now.

Speculative start: once an answer will probably be escalated, and the next tier has room, that tier is begun ahead,
while the answer is still being written or judged. No decision differs by that: the escalation finds the next answer
begun, and an acceptance has it abandoned. A request with a deadline never speculates.

The frontend's executor and the simulator drive this machine: they ask tiers and judges and tell what came of it.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

from controlplane.model.cascade_record import MAX_SCORE
from controlplane.protocols.cascade.terms import CascadeTerms, WithoutJudge
from mesh.errors import IllegalTransition
from mesh.invariants import invariants


class CascadeState(StrEnum):
    """Where the request stands on its way through the tiers."""

    NEW = "new"
    """No tier was asked yet."""
    GENERATING = "generating"
    """A tier is answering it."""
    JUDGING = "judging"
    """Its answer is being judged."""
    DONE = "done"
    """An answer was accepted, which is the client's."""
    FAILED = "failed"
    """No tier could answer: the client gets an error."""


TRANSITIONS: Final[dict[CascadeState, frozenset[CascadeState]]] = {
    CascadeState.NEW: frozenset({CascadeState.GENERATING}),
    CascadeState.GENERATING: frozenset(
        {CascadeState.GENERATING, CascadeState.JUDGING, CascadeState.DONE, CascadeState.FAILED}
    ),
    CascadeState.JUDGING: frozenset({CascadeState.GENERATING, CascadeState.DONE}),
    CascadeState.DONE: frozenset(),
    CascadeState.FAILED: frozenset(),
}


# -- events


@dataclass(frozen=True, slots=True)
class Begin:
    """The request was admitted, and its first tier may be asked."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The tier's answer is complete."""

    tier: int


@dataclass(frozen=True, slots=True)
class EndedEarly:
    """The tier's answer was ended before it was complete: `score` is the most that it could still have got."""

    tier: int
    score: float


@dataclass(frozen=True, slots=True)
class Judged:
    """The judge's score of the tier's answer, 0 to 100."""

    tier: int
    score: float


@dataclass(frozen=True, slots=True)
class NotJudged:
    """No judge could be had for the tier's answer."""

    tier: int


@dataclass(frozen=True, slots=True)
class TierFailed:
    """The tier could not answer, but another one may."""

    tier: int
    reason: str
    reachable: frozenset[int] = frozenset()
    """Tiers that have an instance now: one that had none when it was asked may be asked again."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The tier could not answer, and no other may: its client has begun to get this answer, the request's deadline has
    passed, or the frontend stops."""

    tier: int
    reason: str
    may_accept_another: bool
    """An answer that is there already may be given instead."""


@dataclass(frozen=True, slots=True)
class Doubted:
    """The tier's answer, which is not decided yet, will be escalated with this probability."""

    tier: int
    p_escalates: float
    with_room: frozenset[int]
    """Tiers that have spare capacity now."""


Event: TypeAlias = Begin | Answered | EndedEarly | Judged | NotJudged | TierFailed | Broken | Doubted


# -- instructions


class AcceptReason(StrEnum):
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


class EscalationReason(StrEnum):
    """Why a further tier is asked."""

    LOW_SCORE = "low_score"
    """The answer before it scored less than the threshold."""
    GIVEN_UP = "given_up"
    """The answer before it could not score the threshold any more, and was ended early."""
    NOT_JUDGED = "not_judged"
    """Nobody could judge the answer before it, and the terms say to go on then."""
    TIER_FAILED = "tier_failed"
    """The tier before it could not answer."""


@dataclass(frozen=True, slots=True)
class Generate:
    """Let this tier answer the request; tell `Answered`, `EndedEarly`, `TierFailed` or `Broken`."""

    tier: int
    reason: EscalationReason | None = None
    """None for the first tier that is asked."""
    attempt: int = field(default=1, kw_only=True)
    """Which time the tier is asked, from 1."""
    timeout_s: float | None = field(default=None, kw_only=True)
    """After so long it is too late for this answer: `Broken`. None: as long as any request may take."""
    will_accept: AcceptReason | None = field(default=None, kw_only=True)
    """Why this answer is the client's, whatever it will say: it may be shown while it is being written. None: it may be
    judged, or cut for one that is there already."""
    may_be_judged: bool = field(default=False, kw_only=True)
    early_exit_below: float = field(default=0.0, kw_only=True)
    """The answer may be ended early once it can score no more than less than this; 0: never."""
    begun_ahead: bool = field(default=False, kw_only=True)
    """By `Speculate`: go on with that answer."""


@dataclass(frozen=True, slots=True)
class Speculate:
    """Let this tier begin to answer, beside the one that was asked. `Generate` or `Abandon` follows."""

    tier: int
    may_be_judged: bool


@dataclass(frozen=True, slots=True)
class Abandon:
    """Abort what this tier was begun with ahead: it is not needed."""

    tier: int


@dataclass(frozen=True, slots=True)
class Judge:
    """Have this tier's answer judged; tell `Judged` or `NotJudged`."""

    tier: int
    timeout_s: float | None = field(default=None, kw_only=True)
    """A judgement that takes longer comes too late; None: it has no deadline of its own."""


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the cascade router of this tier's answer, for those who count and sample; nobody waits for it."""

    tier: int
    for_score: bool
    """Of an answer that was ended early the router records the score; any other only counts the request."""


@dataclass(frozen=True, slots=True)
class Accept:
    """Give the client this tier's answer, its last complete one."""

    tier: int
    reason: AcceptReason

    @property
    def is_compromise(self) -> bool:
        """Whether the cascade would have gone on, had it been able to."""
        return self.reason not in (AcceptReason.SCORE, AcceptReason.ACCEPTS_ALL, AcceptReason.LAST_TIER)


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell the client that no tier could answer."""

    reason: str
    """The failures of all tiers that were asked."""
    asked: int
    """Whose error the client gets: place among the `Generate` instructions, from 0."""


Instruction: TypeAlias = Generate | Judge | Report | Accept | Fail | Speculate | Abandon
FINAL: Final = (Accept, Fail)


class CascadeStateMachine:
    """Of one request. Every event is answered by `Report`s, if any, and then the one thing to do next; nothing follows
    `Accept` and `Fail`, before which there may be an `Abandon`. A doubt is answered by `Speculate` or by nothing. The
    first tier is asked whatever the deadline: some answer beats none.

    Raises `IllegalTransition`, with the request's story, for an event that the state does not await.
    """

    def __init__(self, request_id: str, terms: CascadeTerms) -> None:
        self.terms = terms
        self.state = CascadeState.NEW
        self.tier = terms.first_tier
        """The one that was asked last."""
        self.scores: dict[int, float] = {}
        """By tier, of the answers that were judged or ended early."""
        self._request_id = request_id
        self._asked: list[int] = []
        """Tiers, in the order in which they were asked."""
        self._answered: list[int] = []
        self._ended_early: list[int] = []
        """Tiers whose answers were ended early and that may be asked again."""
        self._left_out = [tier for tier in range(terms.last_tier) if not terms.accepts_some(tier)]
        """Asked where all others fail: instances of a tier that a new plan wants may still be loading."""
        self._failures: dict[int, str] = {}
        """Why attempts failed, by their place in `_asked`."""
        self._is_falling_back = False
        self._speculated: int | None = None
        """The tier that was begun ahead."""
        self._is_reported = False
        """The cascade router has been told of the request."""

    def handle(self, event: Event, now_s: float) -> tuple[Instruction, ...]:
        """What to do now that this has happened."""
        instructions = self._respond(event, now_s)
        if self._speculated is None or self.state not in (CascadeState.DONE, CascadeState.FAILED):
            return instructions
        abandoned, self._speculated = Abandon(self._speculated), None
        return *instructions[:-1], abandoned, instructions[-1]

    def _respond(self, event: Event, now_s: float) -> tuple[Instruction, ...]:
        match event:
            case Doubted():
                return self._on_doubt(event)
            case Begin():
                self._expect(event, CascadeState.NEW, self.tier)
                return (self._generate(self.tier, None, now_s),)
            case Answered(tier):
                self._expect(event, CascadeState.GENERATING, tier)
                return self._on_answer(tier, now_s)
            case EndedEarly(tier, score):
                self._expect(event, CascadeState.GENERATING, tier)
                return self._on_early_exit(tier, score, now_s)
            case Judged(tier, score):
                self._expect(event, CascadeState.JUDGING, tier)
                return (self._on_score(tier, score, now_s),)
            case NotJudged(tier):
                self._expect(event, CascadeState.JUDGING, tier)
                if self.terms.without_judge is WithoutJudge.ACCEPT:
                    return (self._accept(tier, AcceptReason.JUDGE_DOWN),)
                return (self._escalate(tier, EscalationReason.NOT_JUDGED, now_s),)
            case TierFailed(tier, reason, reachable):
                self._expect(event, CascadeState.GENERATING, tier)
                self._note_failure(reason)
                return (self._on_failure(tier, reachable, now_s),)
            case Broken(tier, reason, may_accept_another):
                self._expect(event, CascadeState.GENERATING, tier)
                self._note_failure(reason)
                if self._answered and may_accept_another:
                    return (self._accept(self._best(), AcceptReason.DEADLINE),)
                return (self._fail(len(self._asked) - 1),)

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        tiers = (*self._asked, *self._answered, *self._ended_early, *self.scores, self.tier)
        assert all(0 <= tier <= self.terms.last_tier for tier in tiers), "no tier but those that may be asked"
        assert all(self._asked.count(tier) <= 2 for tier in self._asked), "a tier is asked again once at most"
        assert all(0 <= score <= MAX_SCORE for score in self.scores.values()), "scores go from 0 to 100"
        once = (*self._answered, *self._ended_early)
        assert len(set(once)) == len(once), "a tier answers once, or is ended early"
        assert set(once) <= set(self._asked), "only those that were asked answer"
        assert (self.state is CascadeState.NEW) == (not self._asked), "what has begun has asked a tier"
        if self.state is CascadeState.JUDGING:
            assert self._answered[-1] == self.tier, "the answer that is judged is the last one"
        if self.state is CascadeState.DONE:
            assert self._answered, "what is accepted is somebody's answer"
        if self._ended_early:
            assert self.terms.deadline_s is None, "with a deadline no answer is ended early"
        if self._speculated is not None:
            assert self.state in (CascadeState.GENERATING, CascadeState.JUDGING), "what is decided needs nothing ahead"
            assert self._speculated == self._next(self.tier), "only the next tier is begun ahead"
        if self._is_falling_back and self.state is not CascadeState.DONE:
            assert not self._answered, "what was ended early is asked again where there is no answer"

    def _on_doubt(self, doubted: Doubted) -> tuple[Instruction, ...]:
        """One tier ahead at the most. A doubt that comes late, of an answer that is decided, changes nothing."""
        is_open = self.state in (CascadeState.GENERATING, CascadeState.JUDGING) and doubted.tier == self.tier
        is_likely = 0 < self.terms.speculate_from <= doubted.p_escalates
        if not (is_open and is_likely and self._may_exit_early) or self._speculated is not None:
            return ()
        above = self._next(self.tier)
        if above not in doubted.with_room:
            return ()
        self._speculated = above
        return (Speculate(above, may_be_judged=not self.terms.accepts_all(above)),)

    def _on_answer(self, tier: int, now_s: float) -> tuple[Instruction, ...]:
        self._answered.append(tier)
        unjudged = self._unjudged
        if unjudged is None and self._fits(self._next(tier), now_s):
            self._go(CascadeState.JUDGING)
            self._is_reported = True
            return (Judge(tier, timeout_s=self._left_s(now_s)),)
        if unjudged is not None:
            accepted = self._accept(tier, unjudged)
        else:
            accepted = self._accept(self._best(), AcceptReason.DEADLINE)
        if self._is_reported:
            return (accepted,)
        self._is_reported = True  # a request that had no answer before is still to be counted
        return Report(tier, for_score=False), accepted

    def _on_early_exit(self, tier: int, score: float, now_s: float) -> tuple[Instruction, ...]:
        if not self._may_exit_early or not 0 <= score < self.terms.thresholds[tier]:
            raise IllegalTransition(f"{self._story()}: an answer that may score {score} was ended early")
        self._ended_early.append(tier)
        self.scores[tier] = score
        self._is_reported = True
        return Report(tier, for_score=True), self._generate(self._next(tier), EscalationReason.GIVEN_UP, now_s)

    def _on_score(self, tier: int, score: float, now_s: float) -> Generate | Accept:
        if not 0 <= score <= MAX_SCORE:
            raise IllegalTransition(f"{self._story()}: a score goes from 0 to {MAX_SCORE:g}, got {score}")
        self.scores[tier] = score
        if score >= self.terms.thresholds[tier]:
            return self._accept(tier, AcceptReason.SCORE)
        return self._escalate(tier, EscalationReason.LOW_SCORE, now_s)

    def _on_failure(self, tier: int, reachable: frozenset[int], now_s: float) -> Generate | Accept | Fail:
        """The next tier may answer, else the best so far is taken, else what any can say."""
        goes_on = tier < self.terms.last_tier and not self._is_falling_back
        if goes_on and (not self._answered or self._fits(self._next(tier), now_s)):
            return self._generate(self._next(tier), EscalationReason.TIER_FAILED, now_s)
        if self._answered:
            return self._accept(self._best(), AcceptReason.TIER_FAILED)
        back_again = [each for each in sorted(reachable) if each != tier and self._asked.count(each) == 1]
        in_reserve = self._ended_early or self._left_out or back_again
        if in_reserve:
            self._is_falling_back = True
            return self._generate(in_reserve.pop(), EscalationReason.TIER_FAILED, now_s)
        return self._fail(max(self._failures, key=lambda place: (self._asked[place], place)))

    @property
    def _unjudged(self) -> AcceptReason | None:
        """Why the tier's answer is accepted without a judge; None: it is not."""
        if self._is_falling_back:
            return AcceptReason.TIER_FAILED
        if self.tier == self.terms.last_tier:
            return AcceptReason.LAST_TIER
        return AcceptReason.ACCEPTS_ALL if self.terms.accepts_all(self.tier) else None

    @property
    def _may_exit_early(self) -> bool:
        """Whether the tier's answer is judged, and no deadline may make it the best there is."""
        return self._unjudged is None and self.terms.deadline_s is None

    def _next(self, tier: int) -> int:
        """The next tier that may be asked and of which some answer would be accepted."""
        return next(above for above in range(tier + 1, self.terms.last_tier + 1) if self.terms.accepts_some(above))

    def _left_s(self, now_s: float) -> float | None:
        return None if self.terms.deadline_s is None else max(0.0, self.terms.deadline_s - now_s)

    def _fits(self, tier: int, now_s: float) -> bool:
        deadline_s = self.terms.deadline_s
        return deadline_s is None or now_s + self.terms.expected_s[tier] <= deadline_s

    def _best(self) -> int:
        """The answer with the highest score. All that were scored were found wanting, so one that never was counts as
        what its tier asks for; of equals the highest tier's, which is meant to be better."""
        asked_for = (*self.terms.thresholds, MAX_SCORE)
        return max(self._answered, key=lambda tier: (self.scores.get(tier, asked_for[tier]), tier))

    def _escalate(self, tier: int, reason: EscalationReason, now_s: float) -> Generate | Accept:
        if not self._fits(self._next(tier), now_s):
            return self._accept(self._best(), AcceptReason.DEADLINE)
        return self._generate(self._next(tier), reason, now_s)

    def _generate(self, tier: int, reason: EscalationReason | None, now_s: float) -> Generate:
        self._go(CascadeState.GENERATING)
        self.tier = tier
        self._asked.append(tier)
        timeout_s = self._left_s(now_s) if self._answered else None
        unjudged = self._unjudged
        ahead, self._speculated = self._speculated, None
        assert ahead in (None, tier), "only the next tier is begun ahead"
        return Generate(
            tier,
            reason,
            attempt=self._asked.count(tier),
            timeout_s=timeout_s,
            will_accept=unjudged if timeout_s is None else None,
            may_be_judged=unjudged is None,
            early_exit_below=self.terms.thresholds[tier] if self._may_exit_early else 0.0,
            begun_ahead=ahead is not None,
        )

    def _accept(self, tier: int, reason: AcceptReason) -> Accept:
        self._go(CascadeState.DONE)
        return Accept(tier, reason)

    def _fail(self, asked: int) -> Fail:
        self._go(CascadeState.FAILED)
        told = (f"tier {self._asked[place]}: {reason}" for place, reason in self._failures.items())
        return Fail("; ".join(told), asked)

    def _note_failure(self, reason: str) -> None:
        self._failures[len(self._asked) - 1] = reason

    def _go(self, state: CascadeState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"{self._story()} cannot become {state}")
        self.state = state

    def _expect(self, event: Event, state: CascadeState, tier: int) -> None:
        if self.state is not state or self.tier != tier:
            raise IllegalTransition(f"{self._story()} does not await {event}")

    def _story(self) -> str:
        return (
            f"request {self._request_id}, {self.state} on tier {self.tier}, answered by {self._answered}, ended early "
            f"by {self._ended_early}, scored {self.scores}, failed {self._failures}"
        )
