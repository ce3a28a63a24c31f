"""A model that vLLM asks for decisions: demo-small as a Qwen3, with a token for each label of an option."""

import json
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "demo" / "models" / "demo-small"
_MERGES = (("y", "es"), ("n", "o"))
"""Of demo-small's tokens, to those that it lacks."""


def write_text_files(path: Path) -> None:
    """Everything but config and weights."""
    for name in ("special_tokens_map.json", "generation_config.json", "tokenizer_config.json"):
        (path / name).write_bytes((SOURCE / name).read_bytes())
    tokenizer = json.loads((SOURCE / "tokenizer.json").read_text())
    model = tokenizer["model"]
    for pair in _MERGES:
        model["vocab"]["".join(pair)] = len(model["vocab"])
        model["merges"].append(list(pair))
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))


def make_decider(path: Path) -> None:
    """Write the checkpoint. A new token is read as the mean of those that it is made of."""
    import torch
    from safetensors.torch import load_file, save_file

    path.mkdir(exist_ok=True)
    write_text_files(path)
    vocabulary = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]
    weights = load_file(str(SOURCE / "model.safetensors"))
    config = json.loads((SOURCE / "config.json").read_text())
    rows = weights["model.embed_tokens.weight"]
    made = [(rows[vocabulary[first]] + rows[vocabulary[second]]) / 2 for first, second in _MERGES]
    weights["model.embed_tokens.weight"] = torch.cat([rows, torch.stack(made)])
    for layer in range(config["num_hidden_layers"]):
        for name in ("q_norm", "k_norm"):
            weights[f"model.layers.{layer}.self_attn.{name}.weight"] = torch.ones(config["head_dim"], dtype=rows.dtype)
    save_file(weights, str(path / "model.safetensors"), {"format": "pt"})
    facts = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": len(vocabulary)}
    (path / "config.json").write_text(json.dumps({**config, **facts}))
