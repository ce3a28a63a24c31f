"""One asking of a tier: what it came to, whether or not it came to an answer."""

from dataclasses import dataclass

from services.frontend.answers.schema import PromptTokensDetails, TierFacts, Usage
from services.frontend.cascade.tier_answer import TierAnswer, TierReader
from services.frontend.errors import ApiError


@dataclass(slots=True)
class Attempt:
    """Filled in as it goes on."""

    tier: int
    model: str
    began_s: float
    reader: TierReader | None = None
    """Once the request was placed."""
    answer: TierAnswer | None = None
    """Once it has ended, or was given up."""
    cut_s: float | None = None
    """What it took until it was cut at the request's deadline."""
    failure: ApiError | None = None
    begun_ahead: bool = False
    """Before it was known whether it is needed."""
    abandoned: bool = False
    """It was begun ahead, and not needed."""
    score: float | None = None
    judge: str | None = None
    """Who gave the score, or why nobody did."""

    @property
    def usage(self) -> Usage:
        """So far. A prompt counts unless its tier failed before its first token, when nobody knows of any work."""
        usage = self.reader.usage() if self.reader is not None else None
        if usage is None or (self.failure is not None and not usage.completion_tokens):
            return Usage(0, 0, 0, PromptTokensDetails(0))
        return usage

    def facts(self) -> TierFacts:
        """What the client is told of it."""
        usage = self.usage
        seconds = self.answer.seconds if self.answer is not None else self.cut_s
        return TierFacts(
            model=self.model,
            score=self.score,
            judge=self.judge,
            seconds=None if seconds is None else round(seconds, 6),
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            failure=self.failure.message if self.failure is not None else None,
            given_up=self.answer is not None and self.answer.given_up,
            cut=self.cut_s is not None,
            begun_ahead=self.begun_ahead,
            abandoned=self.abandoned,
        )


def summed(attempts: list[Attempt]) -> Usage:
    """Tokens of all, whether or not their answers were sent."""
    usages = [attempt.usage for attempt in attempts]
    prompt_tokens = sum(usage.prompt_tokens for usage in usages)
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    cached_tokens = sum(usage.cached_tokens for usage in usages)
    return Usage(
        prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, PromptTokensDetails(cached_tokens)
    )
