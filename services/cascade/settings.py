"""Settings of the cascade router."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CascadeSettings:
    """Which cascades there are stands in the state store; this is about asking their judges."""

    judge_deadline_s: float = 10.0
    """Seconds that a judge is given for one answer before the next one is asked."""
    max_judging: int = 256
    """Answers judged at the same time; more are refused."""
    sample_window_s: float = 300.0
    """Seconds from one report of the sampled workload to the planner to the next."""
    sample_requests: int = 50
    """Requests of each window that all tiers are asked, behind every client's, 20 at least to be planned for; 0: no
    sampling."""
    sample_texts: bool = False
    """Keep prompts and answers of the last samples, too, for `penstock cascade export --texts`, which hands them to
    operators."""
    sample_deadline_s: float = 120.0
    """What a tier may take to answer one."""
    judge_api_key: str = ""
    """Sent to external judges (endpoint:MODEL@URL)."""
    mesh_api_key: str = ""
    """Sent to this mesh's own frontends (model:NAME), where they ask for keys."""
