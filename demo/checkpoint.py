"""Demo models on disk, as Hugging Face transformers and vLLM read them: config.json and model.safetensors."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from demo.model import RMS_NORM_EPS, ROPE_THETA, Llama, Shape
from demo.tokenizer import BOS_ID, EOS_ID, MAX_LENGTH_TOKENS, PAD_ID, VOCAB_SIZE


def config(shape: Shape) -> dict[str, object]:
    """The contents of config.json.

    Holds both spellings of what transformers 5 renamed (`dtype`, `rope_parameters`), for older readers.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_LENGTH_TOKENS,
        "rms_norm_eps": RMS_NORM_EPS,
        "rope_theta": ROPE_THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "pretraining_tp": 1,
        "use_cache": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def save_checkpoint(model: Llama, directory: Path) -> None:
    """Write the model's configuration and its weights, rounded to bfloat16."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config(model.shape), indent=2) + "\n")
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def load_checkpoint(directory: Path, dtype: torch.dtype = torch.float32) -> Llama:
    """Read a model that `save_checkpoint` wrote."""
    fields = json.loads((directory / "config.json").read_text())
    shape = Shape(
        hidden=fields["hidden_size"],
        layers=fields["num_hidden_layers"],
        heads=fields["num_attention_heads"],
        kv_heads=fields["num_key_value_heads"],
        head_dim=fields["head_dim"],
        mlp=fields["intermediate_size"],
    )
    model = Llama(shape)
    model.load_state_dict(load_file(directory / "model.safetensors"))
    model.to(dtype).eval()
    return model
