"""What the cascade router can be told."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CascadeSettings:
    """Nothing yet: no cascade can be configured in this version."""
