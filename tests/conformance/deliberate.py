"""What the mesh answers otherwise than a stock server on purpose."""

import re
from dataclasses import dataclass

from tests.conformance.case import Case
from tests.conformance.compare import Difference


@dataclass(frozen=True)
class Deliberate:
    """A difference that stays, with the reason that people read."""

    what: str
    reason: str
    cases: str
    """Matches the names of the cases in which it shows."""
    places: str
    """Matches the places (`Difference.kind`)."""

    def explains(self, case: Case, difference: Difference) -> bool:
        """Whether `difference` is of this kind."""
        return bool(re.fullmatch(self.cases, case.name) and re.fullmatch(self.places, difference.kind))


DELIBERATE = (
    Deliberate(
        "`type` and `code` of errors",
        "are OpenAI's words (`invalid_request_error`, `context_length_exceeded`), which its clients go by; vLLM repeats "
        "the status",
        r".*",
        r"body\.error\.(type|code)",
    ),
    Deliberate(
        "`param` of errors",
        "names the parameter that is wrong as the client wrote it (`messages[0].role`); vLLM gives null or a path of its "
        "own classes",
        r".*",
        r"body\.error\.param",
    ),
)
MOST = 10
"""So few that people read them all."""


def explanation(case: Case, difference: Difference) -> Deliberate | None:
    """Why a difference is there on purpose; None: it is not."""
    return next((each for each in DELIBERATE if each.explains(case, difference)), None)
