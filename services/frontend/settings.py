"""The options of a frontend, as its command line takes them, with their checks."""

import json
from dataclasses import dataclass
from pathlib import Path

from mesh.errors import ConfigurationError

_AT_LEAST_ONE = ("max_running_requests", "max_body_bytes", "max_choices", "max_pending_tokens")
_LONGER_THAN_NOTHING = ("request_deadline_s", "placement_deadline_s", "judge_deadline_s", "freeze_s", "stall_s")

_LISTS = ("allowed_origins", "allowed_methods", "allowed_headers")


@dataclass(frozen=True, slots=True)
class FrontendSettings:
    """Every option of `penstock serve frontend`."""

    http_host: str = "127.0.0.1"
    """Address of the OpenAI-compatible endpoint."""
    http_port: int = 8000
    """Port of the OpenAI-compatible endpoint; 0 takes a free one."""
    api_keys_file: Path | None = None
    """File of API keys, a line each (see `penstock key`); without one no key is asked for."""
    max_running_requests: int = 1024
    """Requests that are served at once."""
    max_queued_requests: int = 1024
    """Requests of one priority class (below, at, above 0) that wait; more are answered 429."""
    max_body_bytes: int = 8 * 1024 * 1024
    """Larger request bodies are answered 413."""
    max_choices: int = 128
    """Answers (prompts times n) of one request."""
    request_deadline_s: float = 600.0
    """A request that takes longer ends with an error."""
    placement_deadline_s: float = 0.5
    """How long the scheduler may take before the frontend places a request itself."""
    judge_deadline_s: float = 30.0
    """How long the cascade router may take to have an answer judged, all its judges together."""
    connect_wait_s: float = 1.0
    """How long a request waits for the connection to the worker it was placed on."""
    instance_wait_s: float = 30.0
    """How long a request waits for an instance that can take it, a new one or one that has lost its worker."""
    max_waiting_requests: int = 512
    """New requests that wait so at once; more are answered 429."""
    max_recoveries: int = 3
    """How often a request is placed again, at least, without gaining a token between two losses of its worker; after
    that it is for as long as --instance-wait-s."""
    freeze_s: float = 0.5
    """A worker that has requests and gives no sign of life for so long, asked twice, has frozen; its requests go on
    elsewhere. Where workers are heard from irregularly it is more, by itself."""
    stall_s: float = 10.0
    """A worker whose engine has requests and makes no step for so long hangs; its requests go on elsewhere."""
    max_pending_tokens: int = 2048
    """Tokens of each choice that wait for a client that does not read; beyond it the request is aborted."""
    tokenizer_cache_characters: int = 16 * 1024 * 1024
    """Text whose tokens are remembered, per model."""

    max_stored_response_bytes: int = 64 * 1024 * 1024
    """Responses (/v1/responses) that are kept for `previous_response_id`; beyond it the least recently used are
    dropped. 0: none are kept."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose pages may call the endpoint from a browser (CORS): a URL, * for all, or a JSON list of them; may be
    given many times. None by default, as with vLLM."""
    allow_credentials: bool = False
    """Let those pages send cookies and the like."""
    allowed_methods: tuple[str, ...] = ("*",)
    """HTTP methods of those pages, or a JSON list of them."""
    allowed_headers: tuple[str, ...] = ("*",)
    """Request headers of those pages, or a JSON list of them."""

    def __post_init__(self) -> None:
        """Raises ConfigurationError for settings with which no request could be served."""
        for name in _LISTS:
            object.__setattr__(self, name, _flat(name, getattr(self, name)))
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ConfigurationError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        for name in _LONGER_THAN_NOTHING:
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"--{name.replace('_', '-')} must be above 0, not {getattr(self, name):g}")


def _flat(name: str, values: tuple[str, ...]) -> tuple[str, ...]:
    """With each JSON list, as vLLM takes them, replaced by what is in it."""
    flat: list[str] = []
    for value in values:
        if not value.startswith("["):
            flat.append(value)
            continue
        try:
            items = json.loads(value)
        except ValueError as error:
            raise ConfigurationError(f"--{name.replace('_', '-')} {value}: not a JSON list ({error})") from error
        if not all(isinstance(item, str) for item in items):
            raise ConfigurationError(f"--{name.replace('_', '-')} {value}: a list of texts is wanted")
        flat += items
    return tuple(flat)
