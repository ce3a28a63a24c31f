"""What the cascade router can be told."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CascadeSettings:
    """Which cascades there are stands in the state store; this is about asking their judges."""

    judge_deadline_s: float = 10.0
    """Seconds that a judge is given for one answer before the next one is asked."""
    max_judging: int = 256
    """Answers judged at the same time; more are refused."""
    judge_api_key: str = ""
    """Sent to external judges (endpoint:MODEL@URL)."""
    mesh_api_key: str = ""
    """Sent to this mesh's own frontends (model:NAME), where they ask for keys."""
