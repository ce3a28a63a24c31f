"""Whether the blocks of a request are simply those of its tokens, in order: then it can move block by block."""

from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs


def movement_obstacle(kv_cache_config: Any) -> str:
    """Why requests of an engine core with this `KVCacheConfig` of vLLM's cannot move; empty if they can. Latent
    attention is full attention here, and so are sliding windows once vLLM has given up to drop what they do not see."""
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        return "its model keeps no KV"
    if len(groups) != 1:
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
        return f"its KV cache has {len(groups)} groups of layers with blocks of their own ({kinds})"
    spec = groups[0].kv_cache_spec
    for each in spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,):
        # R-SWA is full attention by its class, and drops blocks between the prompt and the window.
        if not isinstance(each, FullAttentionSpec) or hasattr(each, "rswa_window"):
            return f"its layers keep a part of the context only ({type(each).__name__})"
    return ""
