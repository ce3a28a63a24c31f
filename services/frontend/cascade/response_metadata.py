"""What a response says of how a cascade came to it: in headers, and as `penstock` beside the answer."""

from collections.abc import Sequence

from controlplane.model.cascade_record import CascadeRecord
from controlplane.protocols.cascade.state_machine import Accept
from services.frontend.answers.schema import CascadeFacts
from services.frontend.cascade.attempt import Attempt

TIER_HEADER = "x-penstock-tier"
SCORES_HEADER = "x-penstock-scores"
BECAUSE_HEADER = "x-penstock-accepted-because"
SECONDS_HEADER = "x-penstock-seconds"


def facts(record: CascadeRecord, accepted: Accept, attempts: Sequence[Attempt], seconds: float | None) -> CascadeFacts:
    """Which tier answers and why, and what came of all that was asked. `seconds`: None while it is being written."""
    return CascadeFacts(
        tier=record.tiers[accepted.tier],
        because=accepted.reason.value,
        compromise=accepted.is_compromise,
        seconds=None if seconds is None else round(seconds, 6),
        tiers=[attempt.facts() for attempt in attempts],
    )


def headers(facts: CascadeFacts) -> dict[str, str]:
    """The same in short, as far as it is known, for answers whose headers are sent with them."""
    scores = ",".join(f"{tier.model}={tier.score:.1f}" for tier in facts.tiers if tier.score is not None)
    return {
        TIER_HEADER: facts.tier,
        BECAUSE_HEADER: facts.because,
        **({SECONDS_HEADER: f"{facts.seconds:.3f}"} if facts.seconds is not None else {}),
        **({SCORES_HEADER: scores} if scores else {}),
    }
