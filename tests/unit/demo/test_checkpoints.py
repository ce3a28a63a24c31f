"""The committed models load, agree with transformers' Llama, and solve what they are made to solve."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed, so the demo models cannot be run")
pytest.importorskip("safetensors", reason="safetensors is not installed, so the demo models cannot be read")

from demo.checkpoint import config, load_checkpoint, save_checkpoint  # noqa: E402
from demo.generation import decode  # noqa: E402
from demo.model import SHAPES, Llama, Shape  # noqa: E402
from demo.tasks import check, generate  # noqa: E402
from demo.tokenizer import MODEL_NAMES, MODELS_DIR, encode_prompt, load_tokenizer  # noqa: E402

torch.set_num_threads(1)

MAX_COMMITTED_BYTES = 12_000_000


def answers(name: str, prompts: list[str]) -> list[str]:
    tokenizer = load_tokenizer()
    decoded = decode(load_checkpoint(MODELS_DIR / name), [encode_prompt(tokenizer, p) for p in prompts])
    return [tokenizer.decode(ids) for ids in decoded]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_solves_most_easy_tasks_that_it_was_not_trained_on(name: str) -> None:
    tasks = generate(11, 40, split="test", difficulties=(1, 2))
    solved = sum(map(check, tasks, answers(name, [task.prompt for task in tasks])))
    assert solved >= 28


@pytest.mark.slow
def test_the_large_model_solves_long_tasks() -> None:
    prompts = ["Count from 87 up to 131.", "Spell: queen apple wolf horse lamp ship moss", "Sum: 7 3 9 4 4 6 1"]
    assert all(map(check, prompts, answers("demo-large", prompts)))


@pytest.mark.slow
def test_a_batch_gives_what_single_prompts_give() -> None:
    prompts = [task.prompt for task in generate(12, 6, split="test", difficulties=(1, 3, 5))]
    alone = [answers("demo-small", [prompt])[0] for prompt in prompts]
    assert answers("demo-small", prompts) == alone


def test_decoding_stops_at_the_limit() -> None:
    tokenizer = load_tokenizer()
    model = load_checkpoint(MODELS_DIR / "demo-small")
    (answer,) = decode(model, [encode_prompt(tokenizer, "Count from 10 up to 30.")], max_new_tokens=7)
    assert len(answer) == 7


@pytest.mark.slow
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_transformers_computes_the_same_logits(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    theirs = transformers.LlamaForCausalLM.from_pretrained(MODELS_DIR / name, dtype=torch.float32).eval()
    ours = load_checkpoint(MODELS_DIR / name)
    ids = torch.randint(0, 640, (1, 150), generator=torch.Generator().manual_seed(0))
    visible = torch.ones(1, 150, 150, dtype=torch.bool).tril()
    with torch.inference_mode():
        hidden, _ = ours(ids, torch.arange(150).unsqueeze(0), visible)
        torch.testing.assert_close(ours.logits(hidden), theirs(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", sorted(SHAPES))
def test_the_config_is_the_shape_that_training_builds(size: str) -> None:
    assert json.loads((MODELS_DIR / f"demo-{size}" / "config.json").read_text()) == config(SHAPES[size])


def test_a_saved_model_comes_back(tmp_path: Path) -> None:
    model = Llama(Shape(hidden=32, layers=1, heads=2, kv_heads=1, head_dim=32, mlp=48))
    save_checkpoint(model, tmp_path)
    loaded = load_checkpoint(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(torch.bfloat16).float())


def test_all_models_together_stay_small() -> None:
    total = sum(path.stat().st_size for path in MODELS_DIR.rglob("*") if path.is_file())
    assert total <= MAX_COMMITTED_BYTES
