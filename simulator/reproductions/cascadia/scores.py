"""Judge scores and answer lengths of real models: what the planner would have sampled.

A column of scores stands for a tier: of the models that were judged, the ones whose mean scores are nearest to those of
the paper's tiers (figure 1).
"""

import csv
import gzip
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from controlplane.planning.cascade.sample import CascadeSample
from mesh.errors import TraceError

FIGURE_1 = (67.0, 78.0, 92.0)
"""Mean quality of DeepSeek-dist-7B, DeepSeek-dist-70B and DeepSeek-671B."""
CHARS_PER_TOKEN = 3.5
COMPLEX_SHARE = 2 / 3
"""Of the questions that make a trace of hard or of easy ones."""
_ASIDE = ("question", "prompt_sha", "prompt_chars")
_SMALL, _LARGE = "mistralai/Mixtral-8x7B-Instruct-v0.1", "gpt-4-1106-preview"
_GSM8K_ROWS = 400
_GSM8K_COLUMNS = (
    "prompt_chars",
    "mixtral_8x7b_correct",
    "gpt4_1106_correct",
    "mixtral_8x7b_response_chars",
    "gpt4_1106_response_chars",
)

Rows = list[dict[str, str]]


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """Questions that every tier has answered; scores 0 to 100."""

    scores: NDArray[np.float64]
    """Shape (n, C)."""
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    """Shape (n, C)."""
    stand_ins: tuple[str, ...]
    """The models that were judged, one for each tier."""
    questions: NDArray[np.intp]
    """Where each stands among all of its workload."""

    def sample(self, rate_per_s: float) -> CascadeSample:
        """The answers as the planner's sample."""
        return CascadeSample(self.scores, self.input_tokens, self.output_tokens, rate_per_s)

    def only(self, rows: NDArray[np.intp]) -> "Answers":
        """The answers to these questions (indices) alone, in their order."""
        return Answers(
            self.scores[rows], self.input_tokens[rows], self.output_tokens[rows], self.stand_ins, self.questions[rows]
        )


def arena_traces(scores_file: Path, chars_file: Path) -> tuple[dict[str, Answers], Answers]:
    """Traces 1 to 3 (hard, mixed, easy) and all questions together.

    How hard a question is, is told by the mean score of the models that stand for no tier: to choose by the tiers' own
    scores would choose their luck. Raises `TraceError` for files of another form.
    """
    table, chars = _read(scores_file), _read(chars_file)
    try:
        judged = {name: np.array([float(row[name] or -1) for row in table]) for name in table[0] if name not in _ASIDE}
        lengths = {name: np.array([float(row[name]) for row in chars]) for name in chars[0] if name != "question"}
        prompt_chars = np.array([float(row["prompt_chars"]) for row in table])
    except (KeyError, ValueError, IndexError) as error:
        raise TraceError(f"{scores_file} and {chars_file} are no judged answers: {error!r}") from error
    if [row["question"] for row in table] != [row["question"] for row in chars]:
        raise TraceError(f"{scores_file} and {chars_file} are not about the same questions")
    names = nearest({name: rescaled(scores[scores >= 0]).mean() for name, scores in judged.items()}, FIGURE_1)
    usable = np.flatnonzero(np.all([judged[name] >= 0 for name in names], axis=0))
    answers = Answers(
        scores=np.stack([rescaled(judged[name]) for name in names], axis=1)[usable],
        input_tokens=_tokens(prompt_chars[usable]),
        output_tokens=_tokens(np.stack([lengths[name] for name in names], axis=1)[usable]),
        stand_ins=names,
        questions=np.arange(len(usable)),
    )
    others = np.stack([scores[usable] for name, scores in judged.items() if name not in names])
    is_known = others >= 0
    ease = np.where(is_known, others, 0.0).sum(axis=0) / np.maximum(is_known.sum(axis=0), 1)
    ascending = np.argsort(ease, kind="stable")
    some = round(COMPLEX_SHARE * len(usable))
    traces = {
        "trace 1 (hard)": answers.only(np.sort(ascending[:some])),
        "trace 2 (mixed)": answers,
        "trace 3 (easy)": answers.only(np.sort(ascending[-some:])),
    }
    return traces, answers


def gsm8k(file: Path, seed: int) -> Answers:
    """A small and a large model on questions of arithmetic; the judge is a checker: 0 or 100."""
    table = _read(file)
    drawn = np.sort(np.random.default_rng(seed).permutation(len(table))[:_GSM8K_ROWS])
    rows = [table[number] for number in drawn.tolist()]
    try:
        columns = {name: np.array([float(row[name]) for row in rows]) for name in _GSM8K_COLUMNS}
    except (KeyError, ValueError) as error:
        raise TraceError(f"{file} is no table of checked answers: {error!r}") from error
    return Answers(
        scores=100 * np.stack([columns["mixtral_8x7b_correct"], columns["gpt4_1106_correct"]], axis=1),
        input_tokens=_tokens(columns["prompt_chars"]),
        output_tokens=_tokens(
            np.stack([columns["mixtral_8x7b_response_chars"], columns["gpt4_1106_response_chars"]], axis=1)
        ),
        stand_ins=(_SMALL, _LARGE),
        questions=np.arange(len(rows)),
    )


def mtbench(file: Path, lengths_from: Path, prompts_from: Path, seed: int) -> Answers:
    """The same two models on MT-Bench's turns. Their answers' lengths are not published: they are drawn from the same
    models' answers to other questions, a prompt and both answers together."""
    found: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    try:
        for row in _read(file):
            found[row["question_id"], row["turn"]][row["model"]] = float(row["score"])
        scores = np.array([[each[_SMALL], each[_LARGE]] for each in found.values() if {_SMALL, _LARGE} <= each.keys()])
        chars = np.array([[float(row[_SMALL]), float(row[_LARGE])] for row in _read(lengths_from)])
        prompts = np.array([float(row["prompt_chars"]) for row in _read(prompts_from)])
    except (KeyError, ValueError) as error:
        raise TraceError(f"{file} is no table of judged turns: {error!r}") from error
    scores = scores[(scores >= 1).all(axis=1)]
    drawn = np.random.default_rng(seed).integers(0, len(chars), len(scores))
    return Answers(
        rescaled(scores), _tokens(prompts[drawn]), _tokens(chars[drawn]), (_SMALL, _LARGE), np.arange(len(scores))
    )


def nearest(means: dict[str, float], wanted: tuple[float, ...]) -> tuple[str, ...]:
    """For each of the ascending means wanted the name with the nearest one, no name twice."""
    names: list[str] = []
    for mean in wanted:
        names.append(min((name for name in means if name not in names), key=lambda name: abs(means[name] - mean)))
    return tuple(sorted(names, key=lambda name: means[name]))


def rescaled(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scores of 1 to 10 on the scale of 0 to 100."""
    return (scores - 1) * (100 / 9)


def _tokens(chars: NDArray[np.float64]) -> NDArray[np.int64]:
    tokens: NDArray[np.int64] = np.maximum(np.rint(chars / CHARS_PER_TOKEN), 1).astype(np.int64)
    return tokens


def _read(file: Path) -> Rows:
    try:
        with gzip.open(file, "rt", newline="") as lines:
            rows = list(csv.DictReader(lines))
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise TraceError(f"{file} cannot be read: {error}") from error
    if not rows:
        raise TraceError(f"{file} has no rows")
    return rows
