"""Which instances compute the same KV for the same tokens, so that one may load what another one saved."""

import json
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Final

from engine_worker.checkpoint_fingerprint import WEIGHT_FILES, checkpoint_fingerprint
from engine_worker.engines.vllm.settings import VllmSettings

_WITHOUT_EFFECT: Final = frozenset(
    """model_path seed max_num_seqs max_queued_requests max_num_batched_tokens max_logprobs kv_cache_memory_bytes
    gpu_memory_utilization enforce_eager cpu_threads cpu_niceness structured_outputs reasoning_parser lora_modules
    movable kv_host kv_port host_kv_bytes host_kv_dir disk_kv stop_timeout_s""".split()
)
"""Settings that do not change what a block holds. Any other, and all of vLLM's own arguments, keep stores apart: rather
two stores than a wrong answer."""


def host_key(settings: VllmSettings) -> str:
    """Equal for engines of one checkpoint and of the same settings, as far as they matter, by the same vLLM and torch.

    The fingerprint reads the ends of the files of weights only; where they lie and when they were written tells those
    apart that differ in the middle. So a copy of a checkpoint has a store of its own. May block; raises
    `ConfigurationError`.
    """
    import torch
    import vllm

    path = Path(settings.model_path)
    files = sorted({file.resolve() for pattern in WEIGHT_FILES for file in path.glob(pattern)})
    told = {name: value for name, value in asdict(settings).items() if name not in _WITHOUT_EFFECT}
    about = [
        checkpoint_fingerprint(path),
        [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files],
        sorted(told.items()),
        [vllm.__version__, torch.__version__],
    ]
    return sha256(json.dumps(about).encode()).hexdigest()
