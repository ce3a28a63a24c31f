"""Judges answers to tasks whose right answer is known."""

from typing import Final

from demo.tasks import UnknownTaskError, score
from mesh.errors import JudgeUnavailable
from services.cascade.judges.interface import JudgedAnswer


class ExactJudge:
    """Checks the demo models' tasks: 100 for the right answer, less the fewer words are in their place.

    The ground truth of experiments; no judge for a service, whose prompts are not of this kind.
    """

    name: Final = "exact"

    async def score(self, judged: JudgedAnswer) -> float:
        try:
            return float(score(judged.prompt.strip(), judged.answer))
        except UnknownTaskError as error:
            raise JudgeUnavailable(f"{error}; the exact judge knows the demo models' tasks only") from error

    async def close(self) -> None:
        """Holds nothing that would have to be closed."""
