"""How sure the model was of its own tokens."""

import math
from typing import Final

from mesh.errors import JudgeUnavailable
from services.cascade.judges.interface import JudgedAnswer


class ConfidenceJudge:
    """score = 100 x exp(mean log-probability of the answer's tokens): the geometric mean of their probabilities.

    Costs nothing and is always there. How well it tells right answers from wrong ones depends on the model (Gupta et
    al., Language model cascades, ICLR 2024, compare it with other uncertainties).
    """

    name: Final = "confidence"

    async def score(self, judged: JudgedAnswer) -> float:
        """See `Judge`."""
        if judged.mean_logprob is None:
            raise JudgeUnavailable("the answer came without the log-probabilities of its tokens")
        return 100.0 * math.exp(min(judged.mean_logprob, 0.0))

    async def close(self) -> None:
        """Nothing to free."""
