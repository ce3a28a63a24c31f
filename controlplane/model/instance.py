"""Descriptions of instances, their states, and the load and KV changes that they report."""

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from controlplane.model.adapter import NO_ADAPTERS, AdapterLoad
from controlplane.model.pull_totals import NO_PULLS, PullTotals


class InstanceState(StrEnum):
    """The states of an instance, by what may be asked of it."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    """Finishes what it has and takes nothing new."""


class InstancePhase(StrEnum):
    """What the operator lets an instance do for others' sake; every engine is able to do both (Arrow, section 5.2)."""

    ANY = "any"
    PREFILL = "prefill"
    """Computes prompts; decodes only where no other instance can."""
    DECODE = "decode"
    """Decodes; computes prompts only where no other instance can."""

    @property
    def prefills(self) -> bool:
        """Whether new requests go there."""
        return self is not InstancePhase.DECODE

    @property
    def decodes(self) -> bool:
        """Whether requests whose prompt was computed elsewhere go there."""
        return self is not InstancePhase.PREFILL


@dataclass(frozen=True, slots=True)
class InstanceDescription:
    """The facts about an instance that hold for one incarnation of it."""

    instance_id: str
    incarnation_id: str
    """Fresh at every start, so that a restarted instance is never taken for its predecessor."""
    address: str
    """host:port of the worker's gRPC server."""
    model: str
    """The name that clients use."""
    model_path: str
    """Where tokenizer and chat template are found."""
    engine: str
    """vllm or simulated."""
    block_tokens: int
    """Tokens of one KV block; prompts are hashed in blocks of this size."""
    kv_blocks: int
    max_model_len_tokens: int
    max_batch_requests: int
    max_step_tokens: int
    """Token budget of one engine step (chunked prefill)."""
    phase: InstancePhase = InstancePhase.ANY
    tensor_parallel: int = 1
    """GPUs (or processes on a CPU) that share each layer."""
    pipeline_parallel: int = 1
    """Groups of these that each hold a part of the layers."""
    device: str = ""
    """What it runs on, as profiles name it; empty: the worker does not say."""
    max_loras: int = 0
    """LoRA adapters that one step may serve; 0: it serves none."""
    kv_token_bytes: int = 0
    """Of a token's KV, over all GPUs of the instance; 0: the worker does not say."""
    host_store_id: str = ""
    """The store of KV blocks in its host's memory; all instances that name the same one see the same blocks. Empty: it
    has none."""
    pulls_prefixes: bool = False
    """Whether it can pull cached prefixes from other instances of its model, and they from it."""


class LoadReport(msgspec.Struct, frozen=True):
    """An instance's load right after an engine step.

    LMetric's indicators (section 3) are these fields and what the scheduler adds for requests it has placed
    but the instance has not reported yet.
    """

    running_requests: int = 0
    queued_requests: int = 0
    queued_prefill_tokens: int = 0
    """Prompt tokens, of waiting and of partly prefilled requests, that are still to be computed."""
    running_tokens: int = 0
    """Context tokens (prompt + generated) of all running requests."""
    kv_blocks_used: int = 0
    """Blocks that running requests hold; cached blocks nobody uses do not count."""
    generated_tokens_total: int = 0
    prefilled_tokens_total: int = 0
    preemptions_total: int = 0
    step_ms: float = 0.0
    """Duration of the last engine step."""
    finished_requests_total: int = 0
    decoding_requests: int = 0
    """Running requests whose prompt is computed: each gets a token a step."""
    token_interval_ms: float = 0.0
    """Mean time between two tokens of the decoding requests over the last seconds; 0 where nothing decodes."""
    transfer_obstacle: str = ""
    """Why no request can be moved to or from here, although the engine could; empty if it can."""
    adapters: AdapterLoad = NO_ADAPTERS
    engine_hit_tokens_total: int = 0
    """Prompt tokens that requests found in the engine's prefix cache."""
    host_hit_tokens_total: int = 0
    """Those that were loaded from the host's memory besides."""
    host_load_token_ms: float = 0.0
    """What a token takes to be loaded, over the last loads, from the disk where it was there; 0: none has been
    measured."""
    disk_hit_tokens_total: int = 0
    """Prompt tokens that were loaded from the host's disk."""
    pulls: PullTotals = NO_PULLS


class KvTier(StrEnum):
    """Where cached blocks lie, as an instance sees it."""

    ENGINE = "engine"
    """In the engine's own KV memory: its prefix cache."""
    HOST = "host"
    """In the memory of its host, from which it loads them; all instances there that have the same layout see the
    same."""
    DISK = "disk"
    """On a disk of its host, likewise."""


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """Change of what an instance has cached, in the mesh's own block hashes (see `prefix_hash`)."""

    stored: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    cleared: bool = False
    """Everything of the tier is gone; `stored` then lists what came after."""
    tier: KvTier = KvTier.ENGINE
