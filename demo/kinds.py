"""The kinds of demo task: what their prompts look like, how large they get, and their exact answers.

Answers that need reckoning spell it out step by step, which lets a model of a million parameters get them
right and makes them long.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from demo.words import WORDS


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of task.

    `prompt(rng, difficulty)` draws a prompt, which `pattern` matches whole; `solve(match)` gives its answer.
    """

    name: str
    pattern: re.Pattern[str]
    prompt: Callable[[random.Random, int], str]
    solve: Callable[[re.Match[str]], str]


# How many items, digits or steps a task has, for difficulties 1 to 8: (smallest, largest).
_WORD_COUNTS: Final = ((1, 3), (4, 6), (7, 10), (11, 15), (16, 22), (23, 31), (32, 44), (45, 60))
_SPELL_COUNTS: Final = ((1, 1), (2, 2), (3, 4), (5, 7), (8, 11), (12, 17), (18, 26), (27, 38))
_COUNT_SPANS: Final = ((2, 3), (4, 6), (7, 10), (11, 16), (17, 25), (26, 38), (39, 56), (57, 80))
_SORT_COUNTS: Final = ((2, 2), (3, 3), (4, 5), (6, 7), (8, 10), (11, 14), (15, 19), (20, 25))
_LARGEST_COUNTS: Final = ((2, 2), (3, 4), (5, 6), (7, 9), (10, 14), (15, 20), (21, 30), (31, 40))
_SUM_COUNTS: Final = ((2, 2), (3, 4), (5, 6), (7, 8), (9, 11), (12, 15), (16, 20), (21, 26))
_DIGIT_COUNTS: Final = ((1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (7, 8), (9, 11), (12, 15))


def _size(rng: random.Random, sizes: tuple[tuple[int, int], ...], difficulty: int) -> int:
    return rng.randint(*sizes[difficulty - 1])


def _words(rng: random.Random, difficulty: int) -> str:
    return " ".join(rng.sample(WORDS, _size(rng, _WORD_COUNTS, difficulty)))


def _two_digit_numbers(rng: random.Random, count: int) -> str:
    return " ".join(map(str, rng.sample(range(10, 100), count)))


def _number(rng: random.Random, digits: int) -> int:
    return rng.randrange(10 ** (digits - 1), 10**digits)


def _count_prompt(rng: random.Random, difficulty: int) -> str:
    span = _size(rng, _COUNT_SPANS, difficulty) - 1
    low = rng.randint(1, 200)
    if rng.random() < 0.5:
        return f"Count from {low} up to {low + span}."
    return f"Count from {low + span} down to {low}."


def _count_answer(match: re.Match[str]) -> str:
    first, direction, last = int(match[1]), match[2], int(match[3])
    numbers = range(first, last + 1) if direction == "up" else range(first, last - 1, -1)
    return " ".join(map(str, numbers))


def _spell_prompt(rng: random.Random, difficulty: int) -> str:
    return "Spell: " + " ".join(rng.sample(WORDS, _size(rng, _SPELL_COUNTS, difficulty)))


def _sum_prompt(rng: random.Random, difficulty: int) -> str:
    return "Sum: " + " ".join(str(rng.randint(1, 9)) for _ in range(_size(rng, _SUM_COUNTS, difficulty)))


def _sum_answer(match: re.Match[str]) -> str:
    """Partial sums: `7 3 9` becomes `7 +3=10 +9=19`."""
    terms = [int(term) for term in match[1].split()]
    totals = list(accumulate(terms))
    steps = [f"+{term}={total}" for term, total in zip(terms[1:], totals[1:], strict=True)]
    return " ".join([str(terms[0]), *steps])


def _add_prompt(rng: random.Random, difficulty: int) -> str:
    digits = _size(rng, _DIGIT_COUNTS, difficulty)
    return f"Add {_number(rng, digits)} and {_number(rng, digits)}."


def _add_answer(match: re.Match[str]) -> str:
    """Column by column from the right, digit + digit + carry, then the sum: `7+8+0=15 5+6+1=12 :125`."""
    digits = max(len(match[1]), len(match[2]))
    carry, steps = 0, []
    for a, b in zip(reversed(match[1].zfill(digits)), reversed(match[2].zfill(digits)), strict=True):
        column = int(a) + int(b) + carry
        steps.append(f"{a}+{b}+{carry}={column:02d}")
        carry = column // 10
    return " ".join([*steps, f":{int(match[1]) + int(match[2])}"])


def _sort_answer(match: re.Match[str]) -> str:
    return " ".join(sorted(match[1].split(), key=int))


def _kind(
    name: str,
    pattern: str,
    prompt: Callable[[random.Random, int], str],
    solve: Callable[[re.Match[str]], str],
) -> Kind:
    return Kind(name, re.compile(pattern, re.ASCII), prompt, solve)


_WORD_LIST: Final = r"([a-z]+(?: [a-z]+)*)"
_NUMBER_LIST: Final = r"(\d+(?: \d+)*)"

KINDS: Final[dict[str, Kind]] = {
    kind.name: kind
    for kind in (
        _kind("copy", "Repeat: " + _WORD_LIST, lambda rng, d: "Repeat: " + _words(rng, d), lambda m: m[1]),
        _kind(
            "reverse",
            "Reverse: " + _WORD_LIST,
            lambda rng, d: "Reverse: " + _words(rng, d),
            lambda m: " ".join(reversed(m[1].split())),
        ),
        _kind(
            "spell",
            "Spell: " + _WORD_LIST,
            _spell_prompt,
            lambda m: " ".join("-".join(word) for word in m[1].split()),
        ),
        _kind("count", r"Count from (\d{1,4}) (up|down) to (\d{1,4})\.", _count_prompt, _count_answer),
        _kind(
            "sort",
            "Sort: " + _NUMBER_LIST,
            lambda rng, d: "Sort: " + _two_digit_numbers(rng, _size(rng, _SORT_COUNTS, d)),
            _sort_answer,
        ),
        _kind(
            "largest",
            "Largest: " + _NUMBER_LIST,
            lambda rng, d: "Largest: " + _two_digit_numbers(rng, _size(rng, _LARGEST_COUNTS, d)),
            lambda m: max(m[1].split(), key=int),
        ),
        _kind("sum", "Sum: " + _NUMBER_LIST, _sum_prompt, _sum_answer),
        _kind("add", r"Add (\d{1,30}) and (\d{1,30})\.", _add_prompt, _add_answer),
    )
}
