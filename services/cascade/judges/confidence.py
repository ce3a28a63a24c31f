"""How sure the model was of its own tokens."""

from typing import Final

from controlplane.protocols.cascade.confidence import confidence_of
from mesh.errors import JudgeUnavailable
from services.cascade.judges.interface import JudgedAnswer


class ConfidenceJudge:
    """The lowest geometric mean of the tokens' probabilities so far (`controlplane.protocols.cascade.confidence`).

    Costs nothing and is always there. How well it tells right answers from wrong ones depends on the model (Gupta et
    al., Language model cascades, ICLR 2024, compare uncertainties of whole answers).
    """

    name: Final = "confidence"

    async def score(self, judged: JudgedAnswer) -> float:
        if not judged.token_logprobs:
            raise JudgeUnavailable("the answer came without the log-probabilities of its tokens")
        return confidence_of(judged.token_logprobs).score

    async def close(self) -> None:
        """Holds nothing that would have to be closed."""
