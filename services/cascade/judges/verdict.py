"""What a judge's verdict is worth, from the probabilities of what it might have said or from what it said (pure)."""

import hashlib
import math
import re
from collections.abc import Mapping

from mesh.errors import JudgeUnavailable

MIN_JUDGED = 0.5
"""At least this much of the probability must lie on verdicts, or the model was not judging."""
_THOUGHT = re.compile(r"^.*</think(?:ing)?>", re.DOTALL)


def expected_value(logprobs: Mapping[str, float], values: Mapping[str, float]) -> float:
    """The expected value over the tokens that are verdicts, whatever blanks they come with; 0 to 1.

    Finer than the verdict that was said: a judge that wavers between 6 and 7 comes out in between. Raises
    `JudgeUnavailable` where the tokens are mostly no verdicts.
    """
    expected = judged = total = 0.0
    for token, logprob in logprobs.items():
        probability = math.exp(min(logprob, 0.0))
        total += probability
        value = values.get(token.strip().lstrip("▁Ġ"))
        if value is not None:
            judged += probability
            expected += probability * value
    # Of a truncated list of tokens only what is listed is known; what is listed must be verdicts in the main.
    if total <= 0 or judged < MIN_JUDGED * total:
        likeliest = max(logprobs, key=lambda token: logprobs[token], default="")
        raise JudgeUnavailable(_no_verdict(likeliest, values))
    return expected / judged


def said_value(text: str, values: Mapping[str, float]) -> float:
    """What the first verdict in the text is worth, 0 to 1; what the model thought aloud before is no part of it.

    Raises `JudgeUnavailable` where there is none.
    """
    said = _THOUGHT.sub("", text)
    alone = re.search(rf"(?<![\w.])([{''.join(values)}])(?![\w]|\.\d)", said)
    if alone is None or "<think" in said:
        raise JudgeUnavailable(_no_verdict(said[:80], values))
    return values[alone[1]]


def rubric_digest(rubric: str) -> str:
    """By which a judge's name tells its rubric from others: their scores do not compare."""
    return hashlib.sha256(rubric.encode()).hexdigest()[:8] if rubric else ""


def _no_verdict(said: str, values: Mapping[str, float]) -> str:
    return f"the judge did not reply with a grade or verdict ({', '.join(values)}), but with {said!r}"
