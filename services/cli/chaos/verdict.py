"""Verdict of a chaos run: each answer against the undisturbed one (pure)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import msgspec

from services.cli.chaos.schema import misfit

Fault = Literal[
    "kill",
    "hang",
    "drain",
    "restart",
    "rolling",
    "delete-members",
    "cut-monitor",
    "kill-frontend",
    "kill-scheduler",
    "kill-monitor",
    "wipe-store",
]
Outcome = Literal["right", "lost", "duplicated", "wrong"]
MAX_FAILURES = 50


@dataclass(frozen=True, slots=True)
class Answer:
    """One stream's text, number of tokens and the time between two of its chunks at the longest."""

    text: str
    tokens: int
    finished: bool
    """It ended as a stream should, with a finish reason and `[DONE]`."""
    longest_gap_ms: float = 0.0
    chunks: int = 0
    wait_ms: float = 0.0
    """Time from the request to its first chunk."""
    error: str = ""
    """Why it is not whole; empty if it is."""
    instance_id: str = ""
    """Where it began."""
    resumptions: int = 0
    """Times that its client asked for the rest of it."""


def outcome_of(answer: Answer, expected: Answer) -> Outcome:
    """Compare an answer with the undisturbed one, by its text and its number of tokens.

    "lost": text is missing and nothing else differs. "duplicated": there is more text, which contains the undisturbed
    one. "wrong": any other difference.
    """
    if answer.text == expected.text and answer.tokens == expected.tokens:
        return "right"
    if len(answer.text) < len(expected.text) and _is_subsequence(answer.text, expected.text):
        return "lost"
    if len(answer.text) > len(expected.text) and _is_subsequence(expected.text, answer.text):
        return "duplicated"
    return "wrong"


@dataclass
class Tally:
    """Counts requests of one kind as they end. Bounded but for the gaps, of which there is one for each."""

    requests: int = 0
    finished: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    resumptions: int = 0
    gaps_ms: list[float] = field(default_factory=list)
    waits_ms: list[float] = field(default_factory=list)
    unfit: int = 0
    """Whole answers that do not fit their schema."""
    failures: list[str] = field(default_factory=list)
    """One for each that went wrong, as long as they are few."""

    def add(self, name: str, answer: Answer, expected: Answer, schema: dict[str, Any] | None = None) -> None:
        """Count a request that has ended or was given up. `schema`: that its answer has to fit."""
        outcome = outcome_of(answer, expected)
        wrong = misfit(answer.text, schema) if schema is not None and answer.finished else ""
        self.unfit += bool(wrong)
        self.requests += 1
        self.finished += answer.finished
        self.outcomes[outcome] += 1
        self.resumptions += answer.resumptions
        self.gaps_ms.append(answer.longest_gap_ms)
        self.waits_ms.append(answer.wait_ms)
        if (not answer.finished or outcome != "right") and len(self.failures) < MAX_FAILURES:
            why = answer.error or wrong or f"{answer.tokens} tokens instead of {expected.tokens}, or other ones"
            self.failures.append(f"{name}, begun on {answer.instance_id or 'no instance'}: {why}")

    @property
    def failed(self) -> int:
        """Those that ended without a finish reason and `[DONE]`: an error, a refusal, a broken connection."""
        return self.requests - self.finished


class ChaosReport(msgspec.Struct, frozen=True):
    """What `penstock chaos` prints. All counts but `recovered` are of requests."""

    streams: int
    """Long ones, so many at a time; as one ends before the fault is over, another begins."""
    finished: int
    """Streams that ended as they should."""
    new_requests: int
    """That came at `--rate` from the fault on."""
    failed: int
    """Of both: ended by an error, refused, broken off, or without an end."""
    lost: int
    """Streams and new requests whose text is incomplete."""
    duplicated: int
    """There is more text than in the undisturbed run, which it contains."""
    wrong: int
    """Any other difference."""
    unfit: int
    """With `--schema`: whole answers that do not fit it."""
    recovered: int
    """Times that a frontend placed a request again; one that died meanwhile has taken its count along."""
    resumed: int
    """Times that a client whose stream broke off asked another frontend for the rest."""
    gap_ms_p50: float
    """Of the streams' longest gaps between two chunks: median and maximum."""
    gap_ms_max: float
    wait_ms_max: float
    """Of the new requests: the longest time to the first chunk."""
    healed: bool
    """Nothing is missing in the mesh afterwards that was there before."""
    engine: str
    fault: Fault
    seed: int
    pulled: int = 0
    """Prefixes that instances pulled from each other; one that was killed has taken its last count along."""
    pulls_computed: int = 0
    """Prefixes that were to be pulled, and were computed."""

    @property
    def passed(self) -> bool:
        """Every request ended with exactly the right tokens, and the mesh is whole again."""
        return self.healed and not (self.failed or self.lost or self.duplicated or self.wrong or self.unfit)


def judge(
    streams: Tally,
    new: Tally,
    *,
    recovered: int,
    healed: bool,
    engine: str,
    fault: Fault,
    seed: int,
    pulled: int = 0,
    pulls_computed: int = 0,
) -> ChaosReport:
    """The report of a disturbed run."""
    outcomes = streams.outcomes + new.outcomes
    return ChaosReport(
        streams=streams.requests,
        finished=streams.finished,
        new_requests=new.requests,
        failed=streams.failed + new.failed,
        lost=outcomes["lost"],
        duplicated=outcomes["duplicated"],
        wrong=outcomes["wrong"],
        unfit=streams.unfit + new.unfit,
        recovered=recovered,
        resumed=streams.resumptions + new.resumptions,
        gap_ms_p50=round(median(streams.gaps_ms or [0.0]), 1),
        gap_ms_max=round(max(streams.gaps_ms, default=0.0), 1),
        wait_ms_max=round(max(new.waits_ms, default=0.0), 1),
        healed=healed,
        engine=engine,
        fault=fault,
        seed=seed,
        pulled=pulled,
        pulls_computed=pulls_computed,
    )


def failures_in(tallies: Sequence[Tally]) -> list[str]:
    """A line for each failed or wrong request, at most `MAX_FAILURES` a tally."""
    return [failure for tally in tallies for failure in tally.failures]


def _is_subsequence(short: str, long: str) -> bool:
    rest = iter(long)
    return all(character in rest for character in short)
