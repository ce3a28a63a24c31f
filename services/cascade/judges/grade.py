"""A grade from the probabilities of the tokens that a judge might have said (pure)."""

import math
from collections.abc import Mapping

from mesh.errors import JudgeUnavailable

TOP_GRADE = 9
"""Grades are one digit, one token in every tokenizer."""
MIN_GRADED = 0.5
"""At least this much of the probability must lie on grades, or the model was not grading."""

INSTRUCTIONS = (
    "You grade answers. Read the question and the answer, then give one digit from 0 (useless or wrong) to "
    f"{TOP_GRADE} (correct, complete and to the point). Reply with the digit alone."
)


def question(prompt: str, answer: str) -> str:
    """The prompt that asks a model to grade an answer with one digit."""
    return f"Question:\n{prompt}\n\nAnswer:\n{answer}\n\nGrade (0 to {TOP_GRADE}):"


def score_of(logprobs: Mapping[str, float]) -> float:
    """0 to 100: the expected grade over the tokens that are grades, whatever blanks they come with.

    Finer than the grade that was said: a judge that wavers between 6 and 7 scores in between. Raises
    `JudgeUnavailable` where the tokens are mostly no grades.
    """
    weights = [0.0] * (TOP_GRADE + 1)
    total = 0.0
    for token, logprob in logprobs.items():
        probability = math.exp(min(logprob, 0.0))
        total += probability
        grade = token.strip().lstrip("▁Ġ")
        if len(grade) == 1 and grade in "0123456789":
            weights[int(grade)] += probability
    graded = sum(weights)
    # Of a truncated list of tokens only what is listed is known; what is listed must be grades in the main.
    if total <= 0 or graded < MIN_GRADED * total:
        likeliest = max(logprobs, key=lambda token: logprobs[token], default="")
        raise JudgeUnavailable(f"the judge did not reply with a grade, but with {likeliest!r}")
    return 100.0 / TOP_GRADE * sum(grade * weight for grade, weight in enumerate(weights)) / graded
