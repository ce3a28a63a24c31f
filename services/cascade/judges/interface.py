"""The interface of judges: an answer in, a score from 0 to 100 out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import httpx


@dataclass(frozen=True, slots=True)
class JudgedAnswer:
    """A prompt with its answer, to be scored."""

    prompt: str
    """As the client wrote it; of a conversation, all of it."""
    answer: str
    tier: str
    """The model that gave it."""
    token_logprobs: tuple[float, ...] = ()
    """Empty where nobody recorded them."""
    reference: str | None = None
    """The largest tier's answer, for judges that compare two; None: there is none. Only samples that are labelled have
    one."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A score, and which judge gave it."""

    score: float
    """0 to 100."""
    judge: str
    passed_over: tuple[str, ...] = ()
    """Judges that should have been asked first, and why they gave none."""


class Judge(Protocol):
    """Scores answers. Scores of different judges do not compare: thresholds belong to one of them."""

    @property
    def name(self) -> str:
        """The text by which operators choose the judge, as in `penstock cascade set --judge`."""

    async def score(self, judged: JudgedAnswer) -> float:
        """The answer's score, 0 to 100. Raises `JudgeUnavailable`."""

    async def close(self) -> None:
        """Close connections. The judge is not asked any more."""


@dataclass(frozen=True, slots=True)
class JudgeContext:
    """What is handed to a judge's factory: how it reaches models, its deadline and keys."""

    find_frontend: Callable[[], str]
    """Base URL of a frontend of this mesh at the moment, ending in /v1; empty: there is none."""
    deadline_s: float
    """What it is given for one answer; the next judge is asked then."""
    api_key: str = ""
    """For endpoints elsewhere."""
    mesh_key: str = ""
    """For this mesh's own frontends."""
    http: httpx.AsyncBaseTransport | None = None
    """Carries its requests; None: TCP."""
    rubric: str = ""
    """The cascade's own instructions to judges; empty: it has none."""


@dataclass(frozen=True, slots=True)
class JudgeFactory:
    """How a judge is made. What an entry point of the group `penstock.judges` refers to (docs/plugins.md)."""

    make: Callable[[str, JudgeContext], Judge]
    """From what stands behind the colon in `--judge NAME:ARGUMENT`, or nothing. Opens no connection. Raises
    `ConfigurationError` for an argument that it cannot use."""
    form: str
    """How operators write it."""
