"""A model that reasons: demo-large with two more tokens. </think> stands in for 9, so that counting ends in it."""

import json
from pathlib import Path

from tokenizers import Tokenizer

from tests.vllm.moving import MODEL

SWITCH = "{% if enable_thinking is defined %}<think>{% if not enable_thinking %}</think>{% endif %}{% endif %}"
"""Behind the beginning of an answer, as the templates of such models have it."""


def make_thinker(path: Path, switch: str = "") -> Path:
    """Write the checkpoint. `switch` ends its chat template."""
    from safetensors.torch import load_file, save_file

    path.mkdir(exist_ok=True)
    for name in ("special_tokens_map.json", "generation_config.json"):
        (path / name).write_bytes((MODEL / name).read_bytes())
    about_tokens = json.loads((MODEL / "tokenizer_config.json").read_text())
    about_tokens["chat_template"] += switch
    (path / "tokenizer_config.json").write_text(json.dumps(about_tokens))
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save(str(path / "tokenizer.json"))
    weights = load_file(str(MODEL / "model.safetensors"))
    rows = weights["model.embed_tokens.weight"]
    nine = rows[tokenizer.token_to_id("9")]
    larger = rows.new_zeros((rows.shape[0] + 2, rows.shape[1]))
    larger[: rows.shape[0]], larger[-1] = rows, 1.2 * nine
    save_file({**weights, "model.embed_tokens.weight": larger}, str(path / "model.safetensors"), {"format": "pt"})
    config = json.loads((MODEL / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "vocab_size": larger.shape[0]}))
    return path
