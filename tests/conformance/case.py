"""One question that is put to a stock server and to the mesh."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
METRICS = "/metrics"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


@dataclass(frozen=True)
class Case:
    """What is asked, under a name that is unique and begins with its subject: `chat: seed`."""

    name: str
    path: str
    body: Mapping[str, Any] | None = None
    method: str = "POST"
    after: Self | None = None
    """Asked before; `{id}` in the path stands for the `id` of its answer."""
    until_ended: bool = False
    """Asked again and again until the response that it is about has ended."""
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    """Sent in place of `body`, for what is no JSON."""
    served: str = "demo-large"
    """The model that both servers have."""

    @property
    def subject(self) -> str:
        return self.name.partition(":")[0]
