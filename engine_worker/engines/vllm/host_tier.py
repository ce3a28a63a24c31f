"""The worker's view of the host tier of a vLLM engine: its store, and how many tokens came from it."""

import logging

from msgspec import structs

from controlplane.model.instance import LoadReport
from engine_worker.engines.vllm.connector.messages import HostLoaded
from engine_worker.engines.vllm.host_key import host_key
from engine_worker.engines.vllm.settings import VllmSettings
from engine_worker.host_tier.disk_store import DiskStore
from engine_worker.host_tier.settings import HostTierSettings, open_disk, open_store, parse_disk
from engine_worker.host_tier.store import HostStore
from engine_worker.kv.layout import KvLayout
from mesh.errors import HostTierUnavailable

log = logging.getLogger(__name__)

_MOST_UNPAIRED = 10_000
"""Requests whose blocks were loaded and whose first token has not come, or whose first token has come and for which
nothing was loaded so far."""
_NEWS_SHARE = 0.2


class VllmHostTier:
    """Blocks are copied in the engine core (`connector.host_blocks`); the worker's process only looks at the store.

    Two sockets of the core say, in either order, what was loaded for a request and how many tokens of its prompt were
    cached, the loaded ones among them. Where the load is known last, its tokens count as hits of the engine already.
    As a total never falls, as many of the engine's next hits are not counted.
    """

    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._key = ""
        self._block_tokens = 0
        self._loaded_tokens: dict[str, int] = {}
        self._cached_tokens: dict[str, int] = {}
        self._overcounted_tokens = 0
        self._engine_hit_tokens = self._host_hit_tokens = self._disk_hit_tokens = 0
        self._load_token_ms = 0.0

    def key(self, obstacle: str | None) -> str:
        """What the engine core is to find its store by; empty: there is none. Blocks for as long as the ends of the
        weights take to be read. `obstacle`: why there is no connector."""
        if not self._settings.host_kv_bytes:
            return ""
        settings = self._settings
        processes = settings.tensor_parallel_size * settings.pipeline_parallel_size * settings.data_parallel_size
        if obstacle is None and processes > 1:
            obstacle = "its KV is spread over several processes, and a block of the store is of one"
        if obstacle is not None:
            log.warning("there is no host tier for this engine", extra={"reason": obstacle})
            return ""
        self._key = host_key(self._settings)
        return self._key

    def open(self, layout: KvLayout) -> HostStore | None:
        """The store, to be looked at; None where there is none."""
        self._block_tokens = layout.block_tokens
        if not self._key:
            return None
        host = self._host_settings
        try:
            # On the worker's event loop, which does not wait for a lock.
            return open_store(f"{self._key}/{layout}", layout.block_bytes, host, only_looks=True, lock_s=0.0)
        except HostTierUnavailable as error:
            log.error("the host's store of KV blocks is not told of", extra={"error": str(error)})
            return None

    def open_disk(self, layout: KvLayout) -> DiskStore | None:
        """That on disk, likewise."""
        if not self._key:
            return None
        return open_disk(f"{self._key}/{layout}", layout.block_bytes, self._host_settings, only_looks=True, lock_s=0.0)

    @property
    def _host_settings(self) -> HostTierSettings:
        settings = self._settings
        return HostTierSettings(settings.host_kv_bytes, settings.host_kv_dir, *parse_disk(settings.disk_kv))

    def loaded(self, notice: HostLoaded) -> None:
        """The engine core has loaded blocks for a request."""
        tokens = notice.blocks * self._block_tokens
        of_disk = notice.of_disk * self._block_tokens
        self._disk_hit_tokens += of_disk
        self._host_hit_tokens += tokens - of_disk
        if not notice.is_again:
            if (cached := self._cached_tokens.pop(notice.request_id, None)) is None:
                _keep(self._loaded_tokens, notice.request_id, tokens)
            else:
                self._overcounted_tokens += min(cached, tokens)
        if tokens:
            token_ms = notice.duration_ms / tokens
            self._load_token_ms += (token_ms - self._load_token_ms) * (_NEWS_SHARE if self._load_token_ms else 1.0)

    def cached(self, request_id: str, cached_tokens: int | None) -> None:
        """A request's first token has come; so many tokens of its prompt were not computed."""
        if cached_tokens is None:
            return
        loaded = self._loaded_tokens.pop(request_id, None)
        if loaded is None and cached_tokens and self._settings.host_kv_bytes:
            _keep(self._cached_tokens, request_id, cached_tokens)
        hits = max(0, cached_tokens - (loaded or 0))
        corrected = min(hits, self._overcounted_tokens)
        self._overcounted_tokens -= corrected
        self._engine_hit_tokens += hits - corrected

    def reported(self, load: LoadReport) -> LoadReport:
        """With the hits of each tier."""
        return structs.replace(
            load,
            engine_hit_tokens_total=self._engine_hit_tokens,
            host_hit_tokens_total=self._host_hit_tokens,
            disk_hit_tokens_total=self._disk_hit_tokens,
            host_load_token_ms=self._load_token_ms,
        )


def _keep(tokens: dict[str, int], request_id: str, count: int) -> None:
    tokens[request_id] = count
    while len(tokens) > _MOST_UNPAIRED:
        del tokens[next(iter(tokens))]
