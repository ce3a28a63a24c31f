"""What a judge is."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class JudgedAnswer:
    """An answer to be scored."""

    prompt: str
    """As the client wrote it; of a conversation, all of it."""
    answer: str
    tier: str
    """The model that gave it."""
    token_logprobs: tuple[float, ...] = ()
    """Empty where nobody recorded them."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A score, and who gave it."""

    score: float
    """0 to 100."""
    judge: str
    passed_over: tuple[str, ...] = ()
    """Judges that should have been asked first, and why they gave none."""


class Judge(Protocol):
    """Scores answers. Scores of different judges do not compare: thresholds belong to one of them."""

    @property
    def name(self) -> str:
        """By which operators chose it."""

    async def score(self, judged: JudgedAnswer) -> float:
        """0 to 100. Raises `JudgeUnavailable`."""

    async def close(self) -> None:
        """Free what it holds."""
