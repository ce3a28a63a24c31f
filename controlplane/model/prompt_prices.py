"""What a prompt costs on an instance as it is now, in milliseconds.

Prompts are computed in turn, in chunks that share each step with everything that decodes. A chunk's step is as long as
a step without it and the chunk's own work: the request waits for the whole of it, who decodes for the work only.

This is worked out when an instance's load changes and not for each decision: a decision looks at all instances, while
between two of them only some have changed (256 instances: 14 of 44 microseconds, CPU, were spent on it).
"""

from typing import Final

from controlplane.model.step_costs import StepCosts

LEAST_CHUNK_TOKENS: Final = 64
"""Of a step's budget that decodes leave to prompts, at least: prompts do not stand still behind a full batch."""


class PriceRow:
    """Rows of `Snapshot.prices`, one column for each instance."""

    WAIT: Final = 0
    """Until the prompts that wait there are computed."""
    OWN_TOKEN: Final = 1
    """Of a new token to the request itself."""
    TOKEN: Final = 2
    """Of a new token to everybody there."""
    HALF_PAIR: Final = 3
    """Half of what a new token's attention to one token costs everybody there."""
    BATCH: Final = 4
    """No price: the requests that run, wait or come there."""
    HELD_TOKENS: Final = 5
    """No price: what those have in the KV memory once their prompts are computed."""
    COUNT: Final = 6


def prompt_prices(
    costs: StepCosts, step_tokens: int, running: int, running_tokens: int, batch: int, pending_tokens: int
) -> tuple[float, ...]:
    """A column of `Snapshot.prices`; counts as in `Snapshot`."""
    # At least a chunk: an instance that does not say how long its steps are has none in its column.
    full_step = max(step_tokens, LEAST_CHUNK_TOKENS)
    beside = costs.context_token_ms * running_tokens + costs.decode_request_ms * running + costs.fixed_ms
    own_token = beside / max(full_step - running, LEAST_CHUNK_TOKENS) + costs.prefill_token_ms
    # Steps of short prompts are not full: each costs the fixed part again, whatever it computes.
    token = (costs.fixed_ms / full_step + costs.prefill_token_ms) * batch + own_token
    half_pair = 0.5 * ((batch + 1) * costs.attended_pair_ms)
    return pending_tokens * own_token, own_token, token, half_pair, float(batch), float(running_tokens + pending_tokens)
