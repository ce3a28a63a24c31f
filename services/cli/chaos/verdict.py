"""What became of the streams (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import msgspec

Fault = Literal["kill", "hang", "drain"]
Fate = Literal["right", "lost", "duplicated", "wrong"]


@dataclass(frozen=True, slots=True)
class Answer:
    """One stream's text, number of tokens and the time between two of its chunks at the longest."""

    text: str
    tokens: int
    finished: bool
    """It ended as a stream should, with a finish reason and `[DONE]`."""
    longest_gap_ms: float = 0.0
    chunks: int = 0


class ChaosReport(msgspec.Struct, frozen=True):
    """What `penstock chaos` prints. All counts but `recovered` are of streams."""

    streams: int
    finished: int
    lost: int
    """Text is missing."""
    duplicated: int
    """There is more text than in the undisturbed run, which it contains."""
    wrong: int
    """Any other difference."""
    recovered: int
    """Times that a frontend placed a request again."""
    gap_ms_p50: float
    """Of the streams' longest gaps between two chunks: median and maximum."""
    gap_ms_max: float
    engine: str
    fault: Fault
    seed: int

    @property
    def flawless(self) -> bool:
        """Every stream ended with exactly the right tokens."""
        return self.finished == self.streams and not (self.lost or self.duplicated or self.wrong)


def fate_of(answer: Answer, expected: Answer) -> Fate:
    """How an answer differs from the undisturbed one."""
    if answer.text == expected.text and answer.tokens == expected.tokens:
        return "right"
    if len(answer.text) < len(expected.text) and _is_subsequence(answer.text, expected.text):
        return "lost"
    if len(answer.text) > len(expected.text) and _is_subsequence(expected.text, answer.text):
        return "duplicated"
    return "wrong"


def judge(
    answers: Sequence[Answer], expected: Sequence[Answer], *, recovered: int, engine: str, fault: Fault, seed: int
) -> ChaosReport:
    """Compare answer by answer with the undisturbed run."""
    fates = [fate_of(answer, right) for answer, right in zip(answers, expected, strict=True)]
    gaps_ms = [answer.longest_gap_ms for answer in answers]
    return ChaosReport(
        streams=len(answers),
        finished=sum(answer.finished for answer in answers),
        lost=fates.count("lost"),
        duplicated=fates.count("duplicated"),
        wrong=fates.count("wrong"),
        recovered=recovered,
        gap_ms_p50=round(median(gaps_ms), 1),
        gap_ms_max=round(max(gaps_ms), 1),
        engine=engine,
        fault=fault,
        seed=seed,
    )


def _is_subsequence(short: str, long: str) -> bool:
    rest = iter(long)
    return all(character in rest for character in short)
