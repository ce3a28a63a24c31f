"""Training batches: several conversations packed into each row, with a mask that keeps them apart."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo.tasks import Task
from demo.tokenizer import PAD_ID, encode_answer, encode_prompt

# Attention's cost grows with the row, so short examples go into short rows.
ROW_TOKENS: Final = (96, 192, 384)


@dataclass(frozen=True, slots=True)
class Example:
    """A task as token ids; the first `prompt_tokens` of them are the prompt."""

    ids: list[int]
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of packed examples, all tensors [rows, row length] but `visible`.

    `example` holds the examples' indices and is -1 on padding. `targets` is the next token where that belongs to an
    answer, else -1. `visible` [rows, row length, row length]: same example and not later.
    """

    ids: Tensor
    positions: Tensor
    targets: Tensor
    example: Tensor
    visible: Tensor


def encode(tokenizer: Tokenizer, task: Task) -> Example:
    """The chat of a task and its answer, EOS included."""
    prompt = encode_prompt(tokenizer, task.prompt)
    return Example(prompt + encode_answer(tokenizer, task.answer), len(prompt))


def take(examples: Iterable[Example], tokens: int) -> list[Example]:
    """The first examples that together have at least `tokens` tokens."""
    taken: list[Example] = []
    total = 0
    for example in examples:
        taken.append(example)
        total += len(example.ids)
        if total >= tokens:
            break
    return taken


def pack(examples: Sequence[Example]) -> list[Batch]:
    """Pack examples into rows, one batch per row length that is needed; first fit, the longest first.

    Raises:
        ValueError: an example is longer than the longest row.
    """
    by_length: dict[int, list[int]] = {}
    for index in sorted(range(len(examples)), key=lambda i: -len(examples[i].ids)):
        tokens = len(examples[index].ids)
        row_tokens = next((row for row in ROW_TOKENS if row >= tokens), None)
        if row_tokens is None:
            raise ValueError(f"an example has {tokens} tokens, the longest row {ROW_TOKENS[-1]}")
        by_length.setdefault(row_tokens, []).append(index)
    return [_fill(_rows(members, examples, row), examples, row) for row, members in by_length.items()]


def _rows(members: Sequence[int], examples: Sequence[Example], row_tokens: int) -> list[list[int]]:
    rows: list[list[int]] = []
    room: list[int] = []
    for index in members:
        tokens = len(examples[index].ids)
        row = next((r for r, free in enumerate(room) if free >= tokens), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(row_tokens)
        rows[row].append(index)
        room[row] -= tokens
    return rows


def _fill(rows: Sequence[Sequence[int]], examples: Sequence[Example], row_tokens: int) -> Batch:
    shape = (len(rows), row_tokens)
    ids = torch.full(shape, PAD_ID)
    positions = torch.zeros(shape, dtype=torch.long)
    targets = torch.full(shape, -1)
    owner = torch.full(shape, -1)
    for row, members in enumerate(rows):
        start = 0
        for index in members:
            example = examples[index]
            tokens = torch.tensor(example.ids)
            end = start + len(tokens)
            ids[row, start:end] = tokens
            positions[row, start:end] = torch.arange(len(tokens))
            owner[row, start:end] = index
            targets[row, start + example.prompt_tokens - 1 : end - 1] = tokens[example.prompt_tokens :]
            start = end
    same = owner.unsqueeze(2) == owner.unsqueeze(1)
    return Batch(ids, positions, targets, owner, same.tril())
