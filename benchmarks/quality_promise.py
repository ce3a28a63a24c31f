"""How often a plan misses the quality that it promises: many draws of samples, each plan tried on requests held apart.

    python -m benchmarks.quality_promise --data DIR [--demo answers.jsonl] [--draws 200] [--json OUT]
    python -m benchmarks.quality_promise --make-demo answers.jsonl [--tasks 1200]

Each draw halves a data set at random, plans from a sample of one half, and takes the mean quality of the answers that
the plan's thresholds accept in the other half. `--make-demo` has the demo models answer test tasks (it needs torch):
scores are their confidence, labels an exact check. Of the published sets (shared as `quality/` of a data folder)
arenabench has GPT-4's grades for 150 questions, which are both scores and labels; RouteLLM has two models' right and
wrong answers to MMLU and GSM8K and no scores, so a judge is made up that tells right from wrong with an area under
the curve of 0.8. Latencies are in closed form: a tier takes four times the one before.
"""

import argparse
import csv
import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.planning.cascade.bilevel import PlanRequest, plan
from controlplane.planning.cascade.promise import accepted_quality, plan_with_promise
from controlplane.planning.cascade.replica import ReplicaCurve, ReplicaShape
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.work import TierWork
from controlplane.planning.cascade.workload import WorkloadHeader, WorkloadRequest, read_workload
from mesh.errors import PlanInfeasible

DRAWS = 200
SAMPLES = 600
"""Labelled requests of a draw, where the half has so many."""
PROBABILITY = 95.0
GPUS = 6
JUDGE_SEPARATION = 1.19
"""Standard deviations between the made-up judge's scores of right and of wrong answers: an area of 0.8."""
_UTILISATIONS = np.array([0.01, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95])
_TOKEN_S = (0.01, 0.04, 0.16)
_SMALL, _LARGE = "mixtral_8x7b_correct", "gpt4_1106_correct"
_ARENA_TIERS = ("mistralai/Mistral-7B-Instruct-v0.1", "Starling-LM-7B-alpha", "gpt-4-1106-preview")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of all draws of one set."""

    data: str
    target: float
    kind: str
    """`promised`: with the probability; `mean`: the target just reached on the sample, as without a promise."""
    draws: int
    samples: int
    planned: int
    """Draws for which there was a plan; the others were refused."""
    below: int
    """Of those, how many ended below the target on the half that was held apart."""
    quality: float | None
    """Mean over the plans, on that half."""
    largest_share: float | None
    """Part of the requests that reaches the largest tier."""


@dataclass(frozen=True, slots=True)
class ClosedFormSource:
    """A `CurveSource`: work / (1 - utilisation) on one GPU."""

    sample: CascadeSample

    def work(self, tier: int) -> TierWork:
        tokens = self.sample.output_tokens[:, tier]
        whole_s = tokens.astype(np.float64) * _TOKEN_S[tier]
        return TierWork(np.full(len(tokens), _TOKEN_S[tier]), whole_s, tokens)

    def curves(
        self, tier: int, requests: NDArray[np.intp], output_tokens: NDArray[np.int64]
    ) -> tuple[ReplicaCurve, ...]:
        work_s = output_tokens * _TOKEN_S[tier]
        tail_s, mean_s = float(np.quantile(work_s, 0.95)), float(work_s.mean())
        waits = 1 / (1 - _UTILISATIONS)
        return (ReplicaCurve(ReplicaShape(1, 1), _UTILISATIONS / mean_s, tail_s * waits, mean_s * waits, 1 / mean_s),)


def outcome(data: str, everything: CascadeSample, target: float, kind: str, draws: int, seed: int) -> Outcome:
    """All draws of a set."""
    qualities: list[float] = []
    shares: list[float] = []
    samples = min(SAMPLES, everything.requests // 2)
    for draw in range(draws):
        shuffled = np.random.default_rng((seed, draw)).permutation(everything.requests)
        sample, apart = everything.only(shuffled[:samples]), everything.only(shuffled[everything.requests // 2 :])
        request = PlanRequest(gpus=GPUS, quality=target, minimise="end_to_end")
        source = ClosedFormSource(sample)
        try:
            if kind == "promised":
                result, _ = plan_with_promise(sample, source, request, PROBABILITY, seed=draw)
            else:
                result = plan(sample, source, request)
        except PlanInfeasible:
            continue
        qualities.append(float(accepted_quality(apart, result.thresholds).mean()))
        shares.append(result.routed.shares[-1])
    return Outcome(
        data=data,
        target=target,
        kind=kind,
        draws=draws,
        samples=samples,
        planned=len(qualities),
        below=sum(quality < target for quality in qualities),
        quality=float(np.mean(qualities)) if qualities else None,
        largest_share=float(np.mean(shares)) if shares else None,
    )


def sets(data: Path | None, demo: Path | None) -> Iterator[tuple[str, CascadeSample, tuple[float, ...]]]:
    """(name, all requests, targets)."""
    if demo is not None:
        yield "demo tasks", replace(read_workload(demo.read_bytes().splitlines())[1], rate_per_s=0.1), (85.0,)
    if data is None:
        return
    folder = data / "quality" if (data / "quality").is_dir() else data
    yield "arenabench", _arena(folder / "arenabench_v1_gpt4_scores_even.csv.gz"), (85.0, 75.0)
    for name, targets in (("routellm_gsm8k", (85.0, 75.0)), ("routellm_mmlu", (85.0, 75.0))):
        yield name, checked_answers(folder / f"{name}.csv.gz"), targets


def _arena(file: Path) -> CascadeSample:
    grades = np.array([[float(row[name] or -1) for name in _ARENA_TIERS] for row in _rows(file)])
    return _sample((grades[(grades >= 1).all(axis=1)] - 1) * (100 / 9), None)


def checked_answers(file: Path) -> CascadeSample:
    """Of a file of RouteLLM's: two models, scored by the made-up judge."""
    right = 100 * np.array([[float(row[_SMALL]), float(row[_LARGE])] for row in _rows(file)])
    noise = np.random.default_rng(0).normal(0, 1, right.shape)
    scores = np.clip(50 + 15 * (noise + JUDGE_SEPARATION * (right / 100 - 0.5)), 0, 100)
    return _sample(scores, right)


def _rows(file: Path) -> list[dict[str, str]]:
    with gzip.open(file, "rt", newline="") as lines:
        return list(csv.DictReader(lines))


def _sample(scores: NDArray[np.float64], quality: NDArray[np.float64] | None) -> CascadeSample:
    """Lengths are the same for all: no draw hangs on them."""
    tokens = np.full(scores.shape, 100)
    return CascadeSample(scores, np.full(len(scores), 100), tokens, rate_per_s=0.1, quality=quality)


def make_demo(file: Path, count: int, seed: int) -> None:
    """Have the demo models answer tasks of the test split, and write the scored and checked answers as a workload."""
    import torch

    from controlplane.protocols.cascade.confidence import confidence_of
    from demo.checkpoint import load_checkpoint
    from demo.generation import decode
    from demo.model import Llama
    from demo.tasks import Task, check, generate
    from demo.tokenizer import EOS_ID, MODEL_NAMES, MODELS_DIR, encode_prompt, load_tokenizer

    def logprobs(model: Llama, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        ids = torch.tensor([[*prompt, *answer, EOS_ID]])
        width = ids.shape[1]
        with torch.inference_mode():
            hidden, _ = model(ids, torch.arange(width)[None], torch.ones(1, width, width, dtype=torch.bool).tril())
            of_all = model.logits(hidden[0]).log_softmax(-1)
        values: list[float] = of_all[torch.arange(len(prompt) - 1, width - 1), ids[0, len(prompt) :]].tolist()
        return values

    tokenizer = load_tokenizer()
    drawn = dict.fromkeys(generate(seed, count, split="test"))  # the easiest ones come more than once
    tasks = sorted(drawn, key=lambda task: len(task.answer))
    answers: dict[Task, list[tuple[int, float, float]]] = {task: [] for task in tasks}
    for name in MODEL_NAMES:
        model = load_checkpoint(MODELS_DIR / name, torch.float32)
        for start in range(0, len(tasks), 50):
            batch = tasks[start : start + 50]
            prompts = [encode_prompt(tokenizer, task.prompt) for task in batch]
            for task, prompt, answer in zip(batch, prompts, decode(model, prompts), strict=True):
                score = confidence_of(logprobs(model, prompt, answer)).score
                is_right = check(task, tokenizer.decode(answer))
                answers[task].append((len(answer) + 1, score, 100.0 * is_right))
            print(f"{name}: {start + len(batch)} of {len(tasks)}", file=sys.stderr, flush=True)
    header = WorkloadHeader(1.0, MODEL_NAMES, "confidence", "exact")
    requests = (
        WorkloadRequest(
            len(encode_prompt(tokenizer, task.prompt)),
            output_tokens=tuple(tokens for tokens, _, _ in of_models),
            scores=tuple(score for _, score, _ in of_models),
            quality=tuple(label for _, _, label in of_models),
        )
        for task, of_models in answers.items()
    )
    file.write_bytes(b"\n".join(map(msgspec.json.encode, (header, *requests))) + b"\n")


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes in Markdown, as in docs/cascade.md."""
    lines = [
        "| data | target | planned by | samples | draws planned | below the target | quality | to the largest tier |",
        "|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for each in outcomes:
        quality = "-" if each.quality is None else f"{each.quality:.1f}"
        share = "-" if each.largest_share is None else f"{each.largest_share:.0%}"
        by = f"{PROBABILITY:g} %" if each.kind == "promised" else "the mean"
        cells = (each.data, f"{each.target:g}", by, each.samples, f"{each.planned} of {each.draws}", each.below)
        lines.append(f"| {' | '.join(map(str, (*cells, quality, share)))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the published sets")
    parser.add_argument("--demo", type=Path, help="the demo models' answers, as --make-demo writes them")
    parser.add_argument("--make-demo", type=Path, metavar="FILE")
    parser.add_argument("--tasks", type=int, default=1200, help="that --make-demo has answered")
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--kinds", nargs="+", choices=["promised", "mean"], default=["promised", "mean"])
    parser.add_argument("--only", help="the set of this name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.make_demo is not None:
        make_demo(arguments.make_demo, arguments.tasks, arguments.seed)
        return
    if arguments.data is None and arguments.demo is None:
        parser.error("--data or --demo says what to draw from")
    outcomes: list[Outcome] = []
    for name, everything, targets in sets(arguments.data, arguments.demo):
        if arguments.only not in (None, name):
            continue
        for target in targets:
            for kind in arguments.kinds:
                outcomes.append(outcome(name, everything, target, kind, arguments.draws, arguments.seed))
                print(json.dumps(asdict(outcomes[-1])), file=sys.stderr, flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"outcomes": [asdict(each) for each in outcomes]}, indent=2) + "\n")
    print(table(outcomes))


if __name__ == "__main__":
    main()
