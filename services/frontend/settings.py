"""The options of a frontend, as its command line takes them, with their checks."""

import json
from dataclasses import dataclass
from pathlib import Path

from controlplane.model.media import MAX_MEDIA_BYTES
from mesh.errors import ConfigurationError

_AT_LEAST_ONE = (
    *("max_connections", "max_header_bytes", "max_usage_file_bytes"),
    *("max_running_requests", "max_body_bytes", "max_choices", "max_pending_tokens", "max_media_bytes"),
)
_LONGER_THAN_NOTHING = (
    *("request_deadline_s", "placement_deadline_s", "judge_deadline_s", "freeze_s", "stall_s"),
    *("media_fetch_timeout_s", "header_timeout_s", "slo_ttft_ms", "slo_tpot_ms"),
)

_LISTS = ("allowed_media_domains", "allowed_origins", "allowed_methods", "allowed_headers")


@dataclass(frozen=True, slots=True)
class FrontendSettings:
    """Every option of `penstock serve frontend`."""

    http_host: str = "127.0.0.1"
    """Address of the OpenAI-compatible endpoint."""
    http_port: int = 8000
    """Port of the OpenAI-compatible endpoint; 0 takes a free one."""
    shared_http_port: int = 0
    """A port that it serves besides, together with all other frontends of this machine that are told the same: the
    kernel shares new connections out among them (SO_REUSEPORT). 0: none."""
    tls_certificate: Path | None = None
    """File of the certificate, with its chain, that the endpoint shows its clients (PEM); without one it speaks plain
    HTTP. Read again when it changes."""
    tls_key: Path | None = None
    """File of its key, without a passphrase."""
    max_connections: int = 8192
    """Clients that are connected at once. Those that send no request make way for others."""
    header_timeout_s: float = 10.0
    """A client that has not sent the head of its request by then is answered 408."""
    max_header_bytes: int = 64 * 1024
    """Of a request; larger ones are answered 431."""
    api_keys_file: Path | None = None
    """File of API keys, a line each (see `penstock key`); without one no key is asked for."""
    jwt_issuer: str = ""
    """Issuer of tokens (JWT, as of OpenID Connect) that are asked for besides API keys: what `iss` of each must be.
    Without one no token opens anything."""
    jwt_audience: str = ""
    """What `aud` of each token must be, or have among others."""
    jwt_jwks_url: str = ""
    """Where the issuer publishes its keys, if not at the `jwks_uri` of its /.well-known/openid-configuration, which is
    read otherwise."""
    jwt_leeway_s: float = 30.0
    """By which the issuer's clock may differ from ours."""
    jwt_tenant_claim: str = "sub"
    """The claim that says on whose account a token's requests are served."""
    jwt_scope: str = ""
    """A scope that each token must have, or it is answered 403."""
    jwt_operator_scope: str = ""
    """A scope with which a token is an operator's, as keys of `penstock key NAME --operator` are."""
    separate_tenant_caches: bool = False
    """Let no tenant (API key, or tenant of tokens) find another's blocks in a prefix cache: neither `cached_tokens` nor
    the time to the first token then says what others have asked. What all have in common is computed for each."""
    usage_folder: Path | None = None
    """Folder in which each request that ends is recorded with its tokens, a JSON line each, in a file of this
    frontend's name (see `penstock usage`); without one nothing is recorded."""
    max_usage_file_bytes: int = 64 * 1024 * 1024
    """A larger file is renamed, and the next one begun."""
    usage_files: int = 8
    """Renamed ones that are kept; the oldest beyond are deleted."""
    price: tuple[str, ...] = ()
    """What a million tokens of a model, or of a cascade, cost: MODEL=PROMPT,CACHED,OUTPUT; may be given many times. The
    records of usage then say what each request has cost."""
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
    console_identity: str = ""
    """Folder of an operator's identity, in which the console does what operators ask of it; in a mesh where processes
    have identities the console is read-only without."""
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
    tokenizer_cache_bytes: int = 64 * 1024 * 1024
    """Of pieces of prompts whose tokens are remembered, with these, per model."""

    allowed_media_domains: tuple[str, ...] = ()
    """Hosts that images, recordings and films may be fetched from, also where they have private addresses; may be
    given many times, or as a JSON list. Without any, all hosts of the public network."""
    allowed_local_media_path: str = ""
    """A directory of this machine whose files clients may name as file:// URLs; none by default."""
    media_fetch_timeout_s: float = 10.0
    """How long the fetching of one URL may take."""
    max_media_bytes: int = 32 * 1024 * 1024
    """Of the images, recordings and films of one request, times its answers (`n`); at most 48 MiB. Those within the
    body are bounded by --max-body-bytes, too."""
    max_held_media_bytes: int = 1024 * 1024 * 1024
    """Of those of all requests that run; more are answered 503."""
    max_named_media_bytes: int = 256 * 1024 * 1024
    """Of those that came with a `uuid`, which are kept to be named by it alone; beyond it the least recently used are
    dropped. 0: none are kept."""

    max_stored_response_bytes: int = 64 * 1024 * 1024
    """Responses (/v1/responses) that are kept for `previous_response_id`; beyond it the least recently used are
    dropped. 0: none are kept."""
    allow_runtime_lora_updating: bool = False
    """Let LoRA adapters be loaded and unloaded over HTTP, as VLLM_ALLOW_RUNTIME_LORA_UPDATING=true does; where there
    are API keys, by operators' keys."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose pages may call the endpoint from a browser (CORS): a URL, * for all, or a JSON list of them; may be
    given many times. None by default, as with vLLM."""
    allow_credentials: bool = False
    """Let those pages send cookies and the like."""
    allowed_methods: tuple[str, ...] = ("*",)
    """HTTP methods of those pages, or a JSON list of them."""
    allowed_headers: tuple[str, ...] = ("*",)
    """Request headers of those pages, or a JSON list of them."""
    console: bool = True
    """Serve the console at /console, and lead browsers there from /."""
    docs: bool = True
    """Serve the description of the API at /docs, /redoc and /openapi.json."""
    http_metrics: bool = True
    """Serve Prometheus metrics at the endpoint's /metrics, to which no key is needed; they are at the frontend's own
    metrics port in any case."""
    slo_ttft_ms: float = 1000.0
    """Time to the first token that the console counts a request as served well by; nothing is decided by it."""
    slo_tpot_ms: float = 100.0
    """The same for the mean time from one token to the next."""

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
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigurationError("--tls-certificate and --tls-key belong together: give both, or neither")
        if bool(self.jwt_issuer) != bool(self.jwt_audience) or (self.jwt_jwks_url and not self.jwt_issuer):
            raise ConfigurationError(
                "--jwt-issuer and --jwt-audience belong together: give both, or neither of them and no --jwt-jwks-url"
            )
        if self.max_media_bytes > MAX_MEDIA_BYTES:
            raise ConfigurationError(
                f"--max-media-bytes must be at most {MAX_MEDIA_BYTES}, not {self.max_media_bytes}: more does not fit a "
                "message between two processes"
            )
        if self.allowed_local_media_path and not Path(self.allowed_local_media_path).is_dir():
            raise ConfigurationError(f"--allowed-local-media-path {self.allowed_local_media_path} is no directory")


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
