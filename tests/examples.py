"""How many examples a property is tried with."""

from typing import Final

from hypothesis import settings

WHOLE_EXAMPLES: Final = 100
"""Hypothesis's own default."""
QUICK_EXAMPLES: Final = 10
"""The same under `--hypothesis-profile=quick`."""


def examples(count: int, thorough: int | None = None) -> int:
    """`count`, or its share under a profile that tries fewer by default. A number in `@settings` would override the
    profile. At least 2, so that a property is tried with more than its simplest example. `thorough`: under
    `--hypothesis-profile=thorough`, for properties that a release is tried with at length."""
    if thorough is not None and settings.get_current_profile_name() == "thorough":
        return thorough
    return max(2, count * min(WHOLE_EXAMPLES, settings.default.max_examples) // WHOLE_EXAMPLES)
