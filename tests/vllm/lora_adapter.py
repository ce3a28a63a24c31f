"""A LoRA adapter for a demo model: random weights, large enough to change what it says."""

import json
from pathlib import Path


def make_adapter(path: Path, seed: int, *, rank: int = 4, model: Path) -> str:
    """Write it as peft would; returns the path."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    modules = {
        "self_attn.q_proj": (hidden, heads),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (heads, hidden),
        "mlp.down_proj": (inner, hidden),
    }
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in modules.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / (2 * inputs**0.5)
            weights[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) / 2
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / "adapter_model.safetensors")
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.name,
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(name.partition(".")[2] for name in modules),
        "bias": "none",
    }
    (path / "adapter_config.json").write_text(json.dumps(about))
    return str(path)
