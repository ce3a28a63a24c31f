"""Judges by the names that operators use."""

from collections.abc import Callable
from urllib.parse import urlsplit

import httpx

from mesh.errors import ConfigurationError
from services.cascade.judges.chat import ChatJudge
from services.cascade.judges.confidence import ConfidenceJudge
from services.cascade.judges.exact import ExactJudge
from services.cascade.judges.interface import Judge

FORMS = "confidence, exact, model:NAME (a model of this mesh) or endpoint:MODEL@URL (any OpenAI-compatible one)"


def make_judge(
    text: str,
    find_frontend: Callable[[], str],
    deadline_s: float,
    api_key: str,
    mesh_key: str,
    http: httpx.AsyncBaseTransport | None = None,
) -> Judge:
    """`find_frontend` gives the base URL of a frontend of this mesh, or nothing; `api_key` is for external endpoints,
    `mesh_key` for this mesh's own; `http` carries the requests, None: TCP. Raises `ConfigurationError`."""
    kind, _, rest = text.partition(":")
    if text == ConfidenceJudge.name:
        return ConfidenceJudge()
    if text == ExactJudge.name:
        return ExactJudge()
    if kind == "model" and rest:
        return ChatJudge(text, rest, find_frontend, deadline_s, mesh_key, http)
    if kind == "endpoint":
        model, _, url = rest.partition("@")
        if model and urlsplit(url).scheme in ("http", "https"):
            base = url.rstrip("/")
            return ChatJudge(text, model, lambda: base, deadline_s, api_key, http)
    raise ConfigurationError(f"there is no judge {text!r}; choose one of: {FORMS}")
