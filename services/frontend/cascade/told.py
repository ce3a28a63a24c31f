"""What the client is told of a request's way up a cascade: in headers, and beside the answer."""

from controlplane.model.cascade_record import CascadeRecord
from controlplane.protocols.cascade.walk import Accept
from services.frontend.api.answer_schema import CascadeFacts, PromptTokensDetails, TierFacts, Usage
from services.frontend.cascade.tier_answer import TierAnswer

TIER_HEADER = "x-penstock-tier"
SCORES_HEADER = "x-penstock-scores"
BECAUSE_HEADER = "x-penstock-accepted-because"
SECONDS_HEADER = "x-penstock-seconds"


def facts(
    record: CascadeRecord,
    accepted: Accept,
    answers: dict[int, TierAnswer],
    scores: dict[int, float],
    judges: dict[int, str],
    failures: dict[int, str],
    seconds: float | None,
) -> CascadeFacts:
    """Which tier answers and why, and what every tier that was asked came to. `seconds`: None while it is being
    written."""
    asked = sorted({*answers, *failures})
    return CascadeFacts(
        tier=record.tiers[accepted.tier],
        because=accepted.because.value,
        compromise=accepted.is_compromise,
        seconds=None if seconds is None else round(seconds, 6),
        tiers=[
            TierFacts(
                model=record.tiers[tier],
                score=scores.get(tier),
                judge=judges.get(tier),
                seconds=round(answers[tier].seconds, 6) if tier in answers else None,
                completion_tokens=answers[tier].usage.completion_tokens if tier in answers else 0,
                failure=failures.get(tier),
                given_up=tier in answers and answers[tier].given_up,
            )
            for tier in asked
        ],
    )


def headers(told: CascadeFacts) -> dict[str, str]:
    """The same in short, as far as it is known, for answers whose headers are sent with them."""
    scores = ",".join(f"{tier.model}={tier.score:.1f}" for tier in told.tiers if tier.score is not None)
    return {
        TIER_HEADER: told.tier,
        BECAUSE_HEADER: told.because,
        **({SECONDS_HEADER: f"{told.seconds:.3f}"} if told.seconds is not None else {}),
        **({SCORES_HEADER: scores} if scores else {}),
    }


def summed(usages: list[Usage]) -> Usage:
    """Tokens of all tiers that were asked, whether or not their answers were sent."""
    prompt_tokens = sum(usage.prompt_tokens for usage in usages)
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    cached_tokens = sum(usage.prompt_tokens_details.cached_tokens for usage in usages)
    return Usage(
        prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, PromptTokensDetails(cached_tokens)
    )
