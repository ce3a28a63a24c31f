"""Models that both servers have and that are not among the demo models."""

import json
import shutil
from pathlib import Path

from tests.vllm.lora_adapter import make_adapter

MODELS = Path(__file__).resolve().parents[2] / "demo" / "models"
LOADED, LOADABLE = "poet", "singer"
"""Adapters beside the model: one that the servers start with, and one that they can load."""
NO_TOOLS = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + ('user' if message['role'] == 'tool' else message['role']) + '|>' }}"
    "{{ message['content'] or '' }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""A chat template that has no place for tools."""


def make_toolless(path: Path) -> None:
    """demo-large with a chat template that knows no tools."""
    shutil.copytree(MODELS / "demo-large", path)
    about_tokens = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**about_tokens, "chat_template": NO_TOOLS}))


def make_unmarked(path: Path) -> None:
    """demo-large whose tokenizer puts nothing before a text, as those of most models of today."""
    shutil.copytree(MODELS / "demo-large", path)
    for name, change in (
        ("tokenizer.json", {"post_processor": None}),
        ("tokenizer_config.json", {"add_bos_token": False}),
    ):
        fields = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps({**fields, **change}))


def make_adapted(path: Path) -> None:
    """demo-small, whose answers random adapters change, and adapters in the folder that it is in."""
    shutil.copytree(MODELS / "demo-small", path)
    for seed, name in enumerate((LOADED, LOADABLE)):
        make_adapter(path.parent / name, seed, model=path)
