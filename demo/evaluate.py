"""Measure the committed demo models: `python -m demo.evaluate` prints the tables of demo/README.md."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from demo.checkpoint import load_checkpoint
from demo.generation import decode
from demo.kinds import KINDS
from demo.tasks import DIFFICULTIES, Task, check, generate
from demo.tokenizer import MODEL_NAMES, MODELS_DIR, encode_prompt, load_tokenizer

TEST_SEED: Final = 2025
TEST_TASKS: Final = 1600
BATCH_TASKS: Final = 100


@dataclass(frozen=True, slots=True)
class Outcome:
    """One task answered by one model."""

    task: Task
    solved: bool
    answer_tokens: int


def run_model(name: str, tasks: Sequence[Task], dtype: torch.dtype) -> list[Outcome]:
    """Let a model answer the tasks by greedy decoding."""
    tokenizer = load_tokenizer()
    model = load_checkpoint(MODELS_DIR / name, dtype)
    outcomes: list[Outcome] = []
    by_length = sorted(tasks, key=lambda task: len(task.answer))
    for start in range(0, len(by_length), BATCH_TASKS):
        batch = by_length[start : start + BATCH_TASKS]
        answers = decode(model, [encode_prompt(tokenizer, task.prompt) for task in batch])
        for task, answer in zip(batch, answers, strict=True):
            outcomes.append(Outcome(task, check(task, tokenizer.decode(answer)), len(answer)))
    return outcomes


def accuracy_percent(outcomes: Sequence[Outcome]) -> float:
    """Share of the tasks that were solved, 0 to 100."""
    return 100 * sum(outcome.solved for outcome in outcomes) / len(outcomes)


def table(
    heading: str, groups: Sequence[object], of: Callable[[Task], object], results: Sequence[Sequence[Outcome]]
) -> str:
    """A Markdown table: a row per group, and per model its accuracy and the mean length of its answers."""
    lines = [
        f"| {heading} | tasks | " + " | ".join(f"{name} % right | tokens" for name in MODEL_NAMES) + " |",
        "|---|" + "--:|" * (1 + 2 * len(MODEL_NAMES)),
    ]
    for group in [*groups, None]:
        cells: list[str] = []
        for outcomes in results:
            members = [o for o in outcomes if group is None or of(o.task) == group]
            mean_tokens = sum(o.answer_tokens for o in members) / len(members)
            cells += [f"{accuracy_percent(members):.1f}", f"{mean_tokens:.0f}"]
        lines.append(f"| {'all' if group is None else group} | {len(members)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Parse the command line, run the models and print the tables."""
    parser = argparse.ArgumentParser(description="Measure the demo models on the test split.")
    parser.add_argument("--tasks", type=int, default=TEST_TASKS, help=f"how many (default: {TEST_TASKS})")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    tasks = generate(TEST_SEED, arguments.tasks, split="test")
    results = [run_model(name, tasks, getattr(torch, arguments.dtype)) for name in MODEL_NAMES]
    print(table("kind", tuple(KINDS), lambda task: task.kind, results), end="\n\n")
    print(table("difficulty", DIFFICULTIES, lambda task: task.difficulty, results))


if __name__ == "__main__":
    main()
