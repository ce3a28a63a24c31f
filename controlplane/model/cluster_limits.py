"""Bounds of a cluster table."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClusterLimits:
    """Bounds on what a cluster table remembers, and for how long."""

    max_indexed_blocks: int = 2_000_000
    """Distinct KV blocks of all models and their hosts; 24 bytes of memory each, taken at the start."""
    max_unreported_requests: int = 100_000
    unreported_s: float = 5.0
    """A placed request that no report has counted by then is not coming (its client went away)."""
    unreported_decode_s: float = 120.0
    """The same for one that is to come after its prefill elsewhere, for which it may wait long."""
    arriving_s: float = 15.0
    """The same for one that is to come from elsewhere, its prompt computed; it may have ended instead."""
    max_expected_marks: int = 50_000
    """128 tokens each of prompts that are going to be cached; some 150 bytes."""
    expected_s: float = 30.0
    """A prompt that nobody has computed by then is not counted on any more."""
    max_admitted: int = 20_000
    """Admitted requests that are remembered, in case another scheduler shares their placement only after the report."""
    max_counted: int = 100_000
    """Requests that reports count, so that those that end can be taken out before the next report."""
    max_models: int = 1_000
    """Models remembered after their last instance has gone."""
