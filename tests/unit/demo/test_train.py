"""Training: batches are packed without loss, schedules rise and fall, and a stopped run goes on unchanged."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed, so nothing can be trained")

from demo.batches import Example, encode, pack, take  # noqa: E402
from demo.generation import decode  # noqa: E402
from demo.model import Llama, Shape  # noqa: E402
from demo.tasks import generate  # noqa: E402
from demo.tokenizer import load_tokenizer  # noqa: E402
from demo.train import (  # noqa: E402
    Recipe,
    Trainer,
    example_weights,
    hardest_difficulty,
    learning_rate_factor,
    solved,
    step_examples,
)

TOKENIZER = load_tokenizer()
RECIPE = Recipe(hardest=4, curriculum_share=0.4, steps=8, step_tokens=600, muon_rate=0.02, adamw_rate=1e-3)
SHAPE = Shape(hidden=32, layers=1, heads=1, kv_heads=1, head_dim=32, mlp=32)


def examples(n: int) -> list[Example]:
    return [encode(TOKENIZER, task) for task in generate(21, n, split="train")]


def test_packing_keeps_every_example_whole() -> None:
    chosen = examples(60)
    found = {}
    for batch in pack(chosen):
        for index in batch.example.unique().tolist():
            if index >= 0:
                mine = batch.example == index
                found[index] = batch.ids[mine].tolist()
                assert batch.positions[mine].tolist() == list(range(len(chosen[index].ids)))
                answer = batch.targets[mine & (batch.targets >= 0)].tolist()
                assert answer == chosen[index].ids[chosen[index].prompt_tokens :]
    assert found == {index: example.ids for index, example in enumerate(chosen)}


@pytest.mark.slow
def test_packed_examples_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    model = Llama(SHAPE)
    chosen = [example for example in examples(40) if len(example.ids) <= 40]
    (batch,) = pack(chosen)
    with torch.inference_mode():
        packed, _ = model(batch.ids, batch.positions, batch.visible)
        for index, example in enumerate(chosen):
            tokens = len(example.ids)
            visible = torch.ones(1, tokens, tokens, dtype=torch.bool).tril()
            alone, _ = model(torch.tensor([example.ids]), torch.arange(tokens).unsqueeze(0), visible)
            torch.testing.assert_close(packed[batch.example == index], alone[0], atol=1e-5, rtol=1e-4)


def test_an_example_longer_than_any_row_is_refused() -> None:
    with pytest.raises(ValueError, match="the longest row"):
        pack([Example([7] * 1000, 3)])


def test_take_stops_once_there_are_enough_tokens() -> None:
    assert [len(e.ids) for e in take([Example([1] * n, 1) for n in (4, 5, 6, 7)], 10)] == [4, 5, 6]


def test_weights_add_up_to_one_over_all_answer_tokens() -> None:
    chosen = examples(9)
    weights = example_weights(chosen)
    lengths = torch.tensor([len(e.ids) - e.prompt_tokens for e in chosen])
    assert float((weights * lengths).sum()) == pytest.approx(1.0)


def test_the_curriculum_ends_with_the_recipes_hardest_tasks() -> None:
    recipe = Recipe(6, 0.4, steps=1000, step_tokens=600, muon_rate=0.02, adamw_rate=1e-3)
    hardest = [hardest_difficulty(step, recipe) for step in range(1000)]
    assert hardest == sorted(hardest)
    assert (hardest[0], hardest[500], hardest[-1]) == (2, 6, 6)


def test_the_learning_rate_warms_up_and_falls_to_nothing() -> None:
    factors = [learning_rate_factor(step, 1000) for step in range(1000)]
    peak = factors.index(max(factors))
    assert factors[:peak] == sorted(factors[:peak])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert factors[-1] < 1e-3


def test_solved_means_that_greedy_decoding_gives_the_answer() -> None:
    torch.manual_seed(0)
    model = Llama(SHAPE)
    with torch.no_grad():  # after any token, the next higher id
        for parameter in model.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight[2, 0] = 1.0
        model.model.embed_tokens.weight[5, 0] = 1.0
    prompt = [1, 4, 2, 5]
    right = decode(model, [prompt])[0]
    assert right == []
    assert solved(model, [Example([*prompt, 2], 4), Example([*prompt, 9, 2], 4)]) == [True, False]


@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    whole = Trainer("small", RECIPE)
    losses = [whole.train_step() for _ in range(4)]
    first = Trainer("small", RECIPE)
    assert [first.train_step() for _ in range(2)] == losses[:2]
    first.snapshot(tmp_path / "small.pt")
    second = Trainer("small", RECIPE)
    second.resume(tmp_path / "small.pt")
    assert [second.train_step() for _ in range(2)] == losses[2:]


def test_a_step_has_the_same_examples_each_time() -> None:
    assert step_examples(RECIPE, 3, TOKENIZER) == step_examples(RECIPE, 3, TOKENIZER)
    assert step_examples(RECIPE, 3, TOKENIZER) != step_examples(RECIPE, 4, TOKENIZER)
