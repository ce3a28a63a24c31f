"""What a cascade must answer: the exact answer of one of its tiers, and without faults of which one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fault_simulation.client import ReceivedAnswer
from fault_simulation.oracle import CHAT_PATH, ExpectedChoice, Oracle


@dataclass(frozen=True, slots=True)
class ExpectedCascadeAnswer:
    """What the tiers of a cascade say to one request."""

    choices: Mapping[str, ExpectedChoice]
    """By model."""
    tier: str
    """Whose answer is accepted where nothing fails: the first whose confidence reaches its threshold, or the last."""

    def is_exact(self, answer: ReceivedAnswer) -> bool:
        """Whether this is the whole answer of the tier that it names. Which one that is, faults may have decided: a
        tier that cannot answer and an answer that cannot be judged are passed over."""
        expected, received = self.choices.get(answer.tier), answer.choices.get(0)
        if expected is None or received is None or answer.status != 200 or answer.error:
            return False
        return (received.text, received.finish) == (expected.text, expected.finish)


class CascadeOracle:
    """Knows the answers of a cascade whose judge is `confidence`. Of requests with one choice and without hints."""

    def __init__(self, tiers: Sequence[Oracle]) -> None:
        self._tiers = tiers

    def answer(self, path: str, body: Mapping[str, Any], thresholds: Sequence[float]) -> ExpectedCascadeAnswer:
        """`thresholds`: one for each tier but the last."""
        asked = {**body, "logprobs": True if path == CHAT_PATH else 0}
        found = [tier.answer(path, asked)[0] for tier in self._tiers]
        enough = (index for index, limit in enumerate(thresholds) if found[index].confidence >= limit)
        accepted = self._tiers[next(enough, len(found) - 1)]
        return ExpectedCascadeAnswer(
            {tier.name: one for tier, one in zip(self._tiers, found, strict=True)}, accepted.name
        )
