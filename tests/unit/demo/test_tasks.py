import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo.kinds import KINDS
from demo.tasks import DIFFICULTIES, SPLITS, Split, Task, UnknownTaskError, check, generate, score, solve, split_of

seeds = st.integers(min_value=0, max_value=2**32)
kinds = st.sampled_from(sorted(KINDS))
difficulties = st.sampled_from(DIFFICULTIES)
splits = st.sampled_from(SPLITS)


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("Repeat: owl cat sun", "owl cat sun"),
        ("Reverse: owl cat sun", "sun cat owl"),
        ("Spell: owl cat", "o-w-l c-a-t"),
        ("Count from 98 up to 101.", "98 99 100 101"),
        ("Count from 3 down to 1.", "3 2 1"),
        ("Count from 3 up to 1.", ""),
        ("Sort: 40 9 13", "9 13 40"),
        ("Largest: 40 9 13", "40"),
        ("Sum: 7 3 9", "7 +3=10 +9=19"),
        ("Add 57 and 68.", "7+8+0=15 5+6+1=12 :125"),
        ("Add 5 and 68.", "5+8+0=13 0+6+1=07 :73"),
    ],
)
def test_answers_to_known_prompts(prompt: str, answer: str) -> None:
    assert solve(prompt) == answer
    assert check(prompt, answer)


@given(seeds, splits, kinds, difficulties)
def test_a_task_is_solved_from_its_prompt_alone(seed: int, split: Split, kind: str, difficulty: int) -> None:
    (task,) = generate(seed, 1, split=split, kinds=[kind], difficulties=[difficulty])
    assert (task.kind, task.difficulty, split_of(task.prompt)) == (kind, difficulty, split)
    assert task.answer == solve(task.prompt)
    assert check(task.prompt, f" {task.answer}\n")
    assert score(task.prompt, task.answer) == 100


@given(seeds, kinds, st.text(max_size=30))
def test_only_the_right_answer_passes(seed: int, kind: str, other: str) -> None:
    (task,) = generate(seed, 1, kinds=[kind])
    right = other.strip() == task.answer
    assert check(task, other) == check(task.prompt, other) == right
    assert (score(task, other) == 100) == right
    assert 0 <= score(task, other) <= 100


@given(seeds, splits)
def test_equal_arguments_give_equal_tasks(seed: int, split: Split) -> None:
    assert generate(seed, 5, split=split) == generate(seed, 8, split=split)[:5]


def test_other_seeds_and_splits_give_other_tasks() -> None:
    prompts = [{task.prompt for task in generate(seed, 200, split=s)} for seed in (1, 2) for s in SPLITS]
    train, calibration, test = prompts[:3]
    assert not (train & calibration) | (train & test) | (calibration & test)
    assert prompts[0] != prompts[3]


@pytest.mark.slow
def test_every_kind_has_every_difficulty_in_every_split() -> None:
    for split in SPLITS:
        found = {(task.kind, task.difficulty) for task in generate(3, 3000, split=split)}
        assert found == {(kind, difficulty) for kind in KINDS for difficulty in DIFFICULTIES}


@pytest.mark.slow
def test_harder_tasks_have_longer_prompts_or_answers() -> None:
    for kind in KINDS:
        sizes = [
            sum(len(t.prompt) + len(t.answer) for t in generate(5, 40, kinds=[kind], difficulties=[d]))
            for d in DIFFICULTIES
        ]
        assert sizes == sorted(sizes)


def test_score_is_the_percentage_of_words_in_place() -> None:
    task = Task("Count from 1 up to 4.", "1 2 3 4", "count", 1)
    assert score(task, "1 2 3 5") == 75
    assert score(task, "1 2 3 4 5 6 7 8") == 50
    assert score(task, "") == 0
    assert score(task, "1  2 3 4") == 99  # every word in place, but not the answer


@pytest.mark.parametrize(
    "prompt", ["", "What is the capital of France?", "Sort: ", "Sort: 1 b", "Add 1 and x.", "Sum: ٣ ٤", "Sum: 1\n"]
)
def test_a_prompt_of_no_kind_is_an_error(prompt: str) -> None:
    with pytest.raises(UnknownTaskError, match="not a demo task"):
        check(prompt, "anything")
