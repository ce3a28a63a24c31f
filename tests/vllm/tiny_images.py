"""A checkpoint that takes images: an Idefics3 of random weights, made in a second, whose processor needs PIL alone.

LLaVA, Qwen-VL and Gemma 3 would import torchvision, which the CPU build of torch does not get along with.
"""

import json
from io import BytesIO
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

DEMO_MODEL = Path(__file__).parents[2] / "demo" / "models" / "demo-small"
SPECIAL = ("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tiny_idefics(path: Path) -> None:
    """Write it, with the demo models' tokenizer. Large weights keep greedy choices far apart."""
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    path.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    tiles = (f"<row_{row + 1}_col_{column + 1}>" for row in range(6) for column in range(6))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (*SPECIAL, *tiles)])
    tokenizer.save(str(path / "tokenizer.json"))
    config = json.loads((DEMO_MODEL / "tokenizer_config.json").read_text())
    _write(path / "tokenizer_config.json", {**config, "chat_template": TEMPLATE})

    torch.manual_seed(0)
    pad = tokenizer.token_to_id("<pad>")
    text = {
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "bos_token_id": tokenizer.token_to_id("<s>"),
        "eos_token_id": tokenizer.token_to_id("</s>"),
        "pad_token_id": pad,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    }
    model = Idefics3ForConditionalGeneration(
        Idefics3Config(
            vision_config=vision,
            text_config=text,
            image_token_id=tokenizer.token_to_id("<image>"),
            scale_factor=2,
            pad_token_id=pad,
        )
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.to(torch.float32).save_pretrained(path)
    _write(
        path / "preprocessor_config.json",
        {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 64},
            "max_image_size": {"longest_edge": 32},
            "do_image_splitting": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    )
    _write(path / "processor_config.json", {"processor_class": "Idefics3Processor", "image_seq_len": 4})


def png(seed: int, width: int = 80, height: int = 60) -> bytes:
    """A picture that no other seed makes."""
    from PIL import Image

    picture = Image.new("RGB", (width, height))
    colours = [
        ((x * seed) % 256, (3 * y * seed) % 256, (x * y * seed) % 256) for y in range(height) for x in range(width)
    ]
    picture.putdata(colours)
    file = BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))
