"""How well remaining lengths are predicted by what was learnt while serving, without a training command.

    penstock predictor collect --model demo-large --requests 2000 --every 5 --engine-arg dtype=float32 --out samples/
    python -m benchmarks.online_lengths samples/ [--learnt-from 1000] [--at-once 32] [--json FILE]

The requests of each folder run again, so many at once, in the order in which they were collected: the learner sees what
a worker sees while they run, and their lengths when they end. The figures are of the requests after the first
`--learnt-from`: once while it goes on learning, as it does when it serves, and once with what it had learnt by then
(only the range is still calibrated). The baselines are fitted to those first requests.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from controlplane.prediction.length_learner import LengthLearner, running_requests
from controlplane.prediction.length_samples import LengthSamples
from controlplane.prediction.repetition import WINDOW_TOKENS, repetition
from services.predictor.dataset import AnsweredRequests, DatasetFolder
from services.predictor.evaluation import fit_baselines, mae_tokens


@dataclass(frozen=True, slots=True)
class Figures:
    """One model's; errors are means over the samples of the requests that were not among the first, in tokens."""

    model: str
    requests: int
    learnt_from: int
    samples: int
    baselines_mae_tokens: dict[str, float]
    best_baseline: str
    mae_tokens: float
    change_percent: float
    coverage_percent: float
    frozen_mae_tokens: float
    frozen_change_percent: float
    frozen_coverage_percent: float
    drifts: int
    predict_ms: float
    """CPU time of one prediction of a whole batch."""
    learn_ms_per_request: float
    """CPU time of learning for each request that ended."""


@dataclass(slots=True)
class Replay:
    """What was said of each sample, by number."""

    said: NDArray[np.float64]
    first: list[int]
    """Requests that ended while learning went on, by number."""
    later: list[int]
    predict_s: float = 0.0
    predictions: int = 0
    learn_s: float = 0.0
    drifts: int = 0


def replay(answered: AnsweredRequests, learnt_from: int, at_once: int, freezes: bool) -> Replay:
    """Run the requests again. With `freezes` nothing is learnt after the first ones."""
    samples = answered.samples
    starts = np.unique(samples.requests, return_index=True)[1]
    rows_of = np.split(np.arange(len(samples)), starts[1:])
    features = repetition_features(answered)
    learner = LengthLearner(samples.states.shape[1])
    run = Replay(np.full((len(samples), 3), np.nan), [], [])
    waiting = iter(range(len(rows_of)))
    running: list[tuple[int, int]] = []
    while True:
        running += [(number, 0) for number, _ in zip(waiting, range(at_once - len(running)), strict=False)]
        if not running:
            return run
        at = np.array([rows_of[number][step] for number, step in running])
        started_s = time.process_time()
        said = learner.predict(
            running_requests(
                [str(number) for number, _ in running],
                samples.prompt_tokens[at].tolist(),
                samples.generated_tokens[at].tolist(),
                samples.states[at],
                features[at],
            )
        )
        run.predict_s += time.process_time() - started_s
        run.predictions += 1
        if said is not None:
            run.said[at] = said.columns()
        started_s = time.process_time()
        still = []
        for number, step in running:
            if step + 1 < len(rows_of[number]):
                still.append((number, step + 1))
                continue
            (run.first if len(run.first) < learnt_from else run.later).append(number)
            last = rows_of[number][step]
            run.drifts += learner.ended(
                str(number), int(samples.generated_tokens[last] + samples.remaining_tokens[last])
            )
            while not (freezes and run.later) and learner.learn():
                pass
        run.learn_s += time.process_time() - started_s
        running = still


def repetition_features(answered: AnsweredRequests) -> NDArray[np.float32]:
    """Of the answer as far as it had got, for each sample."""
    samples = answered.samples
    numbers = np.searchsorted(np.unique(samples.requests), samples.requests)
    parts = []
    for start in range(0, len(samples), 64):
        rows = range(start, min(start + 64, len(samples)))
        newest = [
            answered.output_token_ids[numbers[row]][
                max(0, samples.generated_tokens[row] - WINDOW_TOKENS) : samples.generated_tokens[row]
            ]
            for row in rows
        ]
        parts.append(repetition(newest).features())
    return np.concatenate(parts)


def measure(folder: Path, learnt_from: int, at_once: int) -> Figures:
    """Run the folder's requests twice: with learning to the end, and without."""
    dataset = DatasetFolder(folder)
    answered = dataset.answered()
    run = replay(answered, learnt_from, at_once, freezes=False)
    frozen = replay(answered, learnt_from, at_once, freezes=True)
    samples = answered.samples
    known = np.unique(samples.requests)
    train = samples.only(np.isin(samples.requests, known[run.first]))
    is_later = np.isin(samples.requests, known[run.later])
    later = samples.only(is_later)
    baselines = {name: mae_tokens(each, later) for name, each in fit_baselines(train).items()}
    best = min(baselines, key=lambda name: baselines[name])
    mae, coverage = _quality(run.said[is_later], later)
    frozen_mae, frozen_coverage = _quality(frozen.said[is_later], later)
    return Figures(
        model=dataset.description().model,
        requests=len(known),
        learnt_from=len(run.first),
        samples=len(later),
        baselines_mae_tokens=baselines,
        best_baseline=best,
        mae_tokens=mae,
        change_percent=100 * (mae / baselines[best] - 1),
        coverage_percent=coverage,
        frozen_mae_tokens=frozen_mae,
        frozen_change_percent=100 * (frozen_mae / baselines[best] - 1),
        frozen_coverage_percent=frozen_coverage,
        drifts=run.drifts,
        predict_ms=1e3 * run.predict_s / run.predictions,
        learn_ms_per_request=1e3 * run.learn_s / len(known),
    )


def _quality(said: NDArray[np.float64], samples: LengthSamples) -> tuple[float, float]:
    """Mean absolute error in tokens, and the share of samples in their range in percent."""
    came = samples.remaining_tokens
    covered = (said[:, 0] <= came) & (came <= said[:, 2])
    return float(np.abs(said[:, 1] - came).mean()), 100 * float(covered.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="filled by `penstock predictor collect`")
    parser.add_argument("--learnt-from", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = [measure(folder, options.learnt_from, options.at_once) for folder in options.folders]
    for each in figures:
        best = each.baselines_mae_tokens[each.best_baseline]
        print(
            f"{each.model}: {each.mae_tokens:.1f} tokens of error after {each.learnt_from} requests "
            f"({each.change_percent:+.1f} % against {each.best_baseline}, {best:.1f}), "
            f"{each.coverage_percent:.1f} % within the range; without learning on: {each.frozen_mae_tokens:.1f} "
            f"({each.frozen_change_percent:+.1f} %), {each.frozen_coverage_percent:.1f} %; {each.drifts} drifts; "
            f"{each.predict_ms:.2f} ms of CPU a batch, {each.learn_ms_per_request:.1f} ms of learning a request"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in figures], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
