"""Tasks with one right answer, which the prompt alone determines.

The demo models are trained on these, and whatever needs to know whether an answer is right (the cascade's
judge, the length predictor's data, tests) asks `check` or `score`. Answers run from one number to several
hundred tokens, and how long one gets depends on the prompt: on the kind of task, the number of items, the
distance between two numbers.

Prompts fall into three disjoint splits by a hash of their text, so that a prompt belongs to the same split
wherever and whenever it is generated.
"""

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Literal

from demo.kinds import KINDS, Kind

Split = Literal["train", "calibration", "test"]
SPLITS: Final[tuple[Split, ...]] = ("train", "calibration", "test")

DIFFICULTIES: Final = range(1, 9)

_HASH_BUCKETS: Final = 20
_CALIBRATION_BUCKET: Final = 18  # buckets below are for training
_TEST_BUCKET: Final = 19
_MAX_DRAWS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt with its only right answer; `difficulty` is 1 (easiest) to 8 within its `kind`."""

    prompt: str
    answer: str
    kind: str
    difficulty: int


class UnknownTaskError(ValueError):
    """The prompt is not one that the demo tasks produce, so there is no right answer to compare with."""

    def __init__(self, prompt: str) -> None:
        super().__init__(f"not a demo task: {prompt[:80]!r}; demo/kinds.py lists the forms that prompts take")


def split_of(prompt: str) -> Split:
    """The split that a prompt belongs to: 90% train, 5% calibration, 5% test."""
    bucket = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big") % _HASH_BUCKETS
    if bucket < _CALIBRATION_BUCKET:
        return "train"
    return "calibration" if bucket == _CALIBRATION_BUCKET else "test"


def stream(
    seed: int,
    split: Split,
    *,
    kinds: Sequence[str] = tuple(KINDS),
    difficulties: Sequence[int] = DIFFICULTIES,
) -> Iterator[Task]:
    """Yield tasks of one split without end, kind and difficulty uniform; equal arguments give equal tasks.

    Prompts may repeat: the easiest kinds have only some hundreds of them.
    """
    rng = random.Random(f"{seed}/{split}")
    while True:
        yield _draw(rng, KINDS[rng.choice(kinds)], rng.choice(difficulties), split)


def generate(
    seed: int,
    n: int,
    *,
    split: Split = "test",
    kinds: Sequence[str] = tuple(KINDS),
    difficulties: Sequence[int] = DIFFICULTIES,
) -> list[Task]:
    """The first `n` tasks of `stream`."""
    return list(islice(stream(seed, split, kinds=kinds, difficulties=difficulties), n))


def solve(prompt: str) -> str:
    """The right answer to a prompt.

    Raises:
        UnknownTaskError: the prompt is none of the demo tasks.
    """
    for kind in KINDS.values():
        match = kind.pattern.fullmatch(prompt)
        if match is not None:
            return kind.solve(match)
    raise UnknownTaskError(prompt)


def check(task: Task | str, answer_text: str) -> bool:
    """Whether the answer is right, blanks around it aside; `task` may be the bare prompt.

    Raises:
        UnknownTaskError: the prompt is none of the demo tasks.
    """
    return answer_text.strip() == _answer_to(task)


def score(task: Task | str, answer_text: str) -> int:
    """How good the answer is: 100 if right, else the percentage of words in their place, 99 at most.

    Raises:
        UnknownTaskError: the prompt is none of the demo tasks.
    """
    if check(task, answer_text):
        return 100
    given, right = answer_text.split(), _answer_to(task).split()
    in_place = sum(g == r for g, r in zip(given, right, strict=False))
    return min(99, 100 * in_place // max(len(given), len(right)))


def _answer_to(task: Task | str) -> str:
    return task.answer if isinstance(task, Task) else solve(task)


def _draw(rng: random.Random, kind: Kind, difficulty: int, split: Split) -> Task:
    for _ in range(_MAX_DRAWS):
        prompt = kind.prompt(rng, difficulty)
        if split_of(prompt) == split:
            return Task(prompt, solve(prompt), kind.name, difficulty)
    raise RuntimeError(f"no {split} prompt of kind {kind.name!r}, difficulty {difficulty} in {_MAX_DRAWS} draws")
