"""Learns how long a model's requests get while it serves them: no training, no data set, of any model.

    predict: rows of running requests --> network + residual life --> conformal band --> 10, 50, 90 %
                  | remembered                    ^                        ^
    ended:        `--> rows with what came --> samples (bounded) --> learn: one step of descent

It begins with the residual life of the requests that ended and corrects it: by the model's hidden state (projected at
random where it is wide, Johnson and Lindenstrauss 1984), by the tokens of prompt and answer, and by how much the
answer repeats itself. Which of the two answers, corrected or not, is decided by their errors on the latest requests.
Where the ranges suddenly miss, the past is forgotten.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from controlplane.prediction.conformal_band import ConformalBand
from controlplane.prediction.learnt_samples import LearntSamples
from controlplane.prediction.length_quantiles import QUANTILES, Floats, LengthQuantiles, residual_life
from controlplane.prediction.quantile_network import QuantileNetwork
from controlplane.prediction.repetition import FEATURES as REPETITION_FEATURES
from mesh.invariants import invariants

WIDEST_STATE: Final = 256
"""Wider hidden states are projected to this width."""
MOST_RUNNING: Final = 8192
"""Requests that are remembered until they end; of more the oldest are forgotten."""
SAMPLES_OF_REQUEST: Final = 16
"""Kept of each, drawn evenly from all its predictions."""
REMEMBERED_LENGTHS: Final = 1024
FEWEST_SURVIVORS: Final = 8
FEWEST_REQUESTS: Final = 50
"""Requests that must have ended before anything is learnt from them."""
BATCH_SAMPLES: Final = 256
STEPS_OF_REQUEST: Final = 2
"""Steps of descent that a finished request brings."""
MOST_STEPS_DUE: Final = 2048
SAVED_SAMPLES: Final = 2048
"""Of those learnt from, what is kept over a restart."""
JUDGED_REQUESTS: Final = 300
"""Errors of so many decide who answers."""
DRIFT_REQUESTS: Final = 50
"""The latest so many are still learnt from after a drift."""
DRIFT_COVERAGE: Final = 0.6
DRIFT_SHORTFALL: Final = 8.0
"""Drift is noticed by a cumulative sum (Page 1954): how far below `DRIFT_COVERAGE` each request's share of covered
samples lies adds up, and what lies above is taken off. Where ranges that held four of five hold a fifth, it takes 20
requests; where all is well, one in hundreds of thousands of requests brings a false alarm."""

SMOOTHING: Final = 0.3
"""Weight of the newest prediction of a request's whole length, beside those before: it does not change, they do."""

_COUNTS: Final = 5
_TYPICAL_LOG_TOKENS: Final = 4.0
_MOST_LOG_TOKENS: Final = 20.0


@dataclass(frozen=True, slots=True, eq=False)
class RunningRequests:
    """What is known of several running requests at one moment."""

    request_ids: tuple[str, ...]
    prompt_tokens: NDArray[np.int32]
    generated_tokens: NDArray[np.int32]
    states: NDArray[np.float32]
    """Requests x hidden size; of width 0 where the engine tells none."""
    repetition: NDArray[np.float32]
    """Requests x `REPETITION_FEATURES`; see `Repetition.features`."""


@dataclass(frozen=True, slots=True)
class LearnerStanding:
    """How good the predictions were, as they were made, of the requests that ended last."""

    ended_requests: int
    is_learnt: bool
    """Whether the network answers; else the residual life does."""
    mae_tokens: float
    """Of the network's middle; not a number before anything was judged, and so below."""
    residual_mae_tokens: float
    coverage: float
    """Share of the samples whose length lay in the range."""
    drifts: int
    steps_due: int


@dataclass(slots=True)
class _Remembered:
    """The predictions of one running request, a fair draw of them."""

    seen: int = 0
    total_tokens: float | None = None
    """Its whole length as predicted so far; see `SMOOTHING`."""
    rows: list[NDArray[np.float32]] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    said: list[Floats] = field(default_factory=list)
    """The range that was answered, and the network's and the residual life's before adjusting: 9 numbers."""


@dataclass(frozen=True, slots=True)
class _Judged:
    """One finished request's errors: sums over its samples."""

    samples: float
    error_tokens: float
    residual_error_tokens: float
    covered: float


class LengthLearner:
    """For one model; knows nothing at first. Deterministic: the same calls bring the same answers."""

    def __init__(self, hidden_size: int, seed: int = 0) -> None:
        """States of another width are refused by an assertion; see `hidden_size`."""
        self.hidden_size = hidden_size
        self._draw = np.random.default_rng(seed)
        self._projection = _projection(hidden_size, seed)
        width = min(hidden_size, WIDEST_STATE) + _COUNTS + REPETITION_FEATURES
        self.samples = LearntSamples(width)
        self.network = QuantileNetwork.fresh(width + 1, QUANTILES, seed)
        self.lengths: deque[int] = deque(maxlen=REMEMBERED_LENGTHS)
        self._sorted: NDArray[np.int64] | None = None
        self._running: OrderedDict[str, _Remembered] = OrderedDict()
        self.learnt_band, self.residual_band = ConformalBand(), ConformalBand()
        self._judged: deque[_Judged] = deque(maxlen=JUDGED_REQUESTS)
        self._shortfall = 0.0
        self._by_network = False
        self.ended_requests = 0
        self.since_drift = 0
        self.drifts = 0
        self.steps_due = 0

    # -- answering

    def predict(self, requests: RunningRequests) -> LengthQuantiles | None:
        """The ranges of all, which are remembered until the requests end; None before any request has ended."""
        rows = self._rows(requests)
        ages = requests.generated_tokens.astype(np.float64)
        if not self.lengths:
            return None
        residual = residual_life(self._lengths(), ages, FEWEST_SURVIVORS)
        learnt = self._smoothed(requests.request_ids, ages, self._corrected(rows, residual))
        said = self.learnt_band.adjusted(learnt) if self._by_network else self.residual_band.adjusted(residual)
        told = np.concatenate([said.columns(), learnt.columns(), residual.columns()], axis=1)
        for row, request_id in enumerate(requests.request_ids):
            self._remember(request_id, rows[row], int(requests.generated_tokens[row]), told[row])
        return said

    # -- learning

    def ended(self, request_id: str, output_tokens: int) -> bool:
        """A request has ended by itself or at its limit. Returns whether the predictions have drifted, for the log."""
        self.lengths.append(output_tokens)
        self._sorted = None
        self.ended_requests += 1
        self.since_drift += 1
        remembered = self._running.pop(request_id, None)
        if remembered is None:
            return False
        generated = np.array(remembered.generated, np.int32)
        kept = generated < output_tokens
        if not kept.any():
            return False
        weight = remembered.seen / len(generated)
        remaining = (output_tokens - generated[kept]).astype(np.float64)
        weights = np.full(len(remaining), weight, np.float32)
        self.samples.add(np.stack(remembered.rows)[kept], generated[kept], remaining.astype(np.float32), weights)
        self._judge(np.stack(remembered.said)[kept], remaining, weight)
        self.steps_due = min(self.steps_due + STEPS_OF_REQUEST, MOST_STEPS_DUE)
        is_drift = self._notice_drift()
        self._by_network = self._is_better()
        return is_drift

    def learn(self) -> bool:
        """One step of descent, some milliseconds; False if none is due."""
        if not self.steps_due or self.since_drift < FEWEST_REQUESTS or not len(self.samples):
            return False
        self.steps_due -= 1
        rows, generated, remaining = self.samples.draw(self._draw, BATCH_SAMPLES)
        residual = residual_life(self._lengths(), generated.astype(np.float64), FEWEST_SURVIVORS)
        offsets = np.log1p(residual.median).astype(np.float32)
        self.network.learn(self._inputs(rows, residual), np.log1p(remaining), offsets)
        return True

    # -- what it says of itself

    @property
    def standing(self) -> LearnerStanding:
        samples = sum(each.samples for each in self._judged) or np.nan
        return LearnerStanding(
            ended_requests=self.ended_requests,
            is_learnt=self._by_network,
            mae_tokens=sum(each.error_tokens for each in self._judged) / samples,
            residual_mae_tokens=sum(each.residual_error_tokens for each in self._judged) / samples,
            coverage=sum(each.covered for each in self._judged) / samples,
            drifts=self.drifts,
            steps_due=self.steps_due,
        )

    # -- over a restart

    def state(self) -> dict[str, NDArray[np.generic]]:
        """All that was learnt, in arrays by name: network, scales, the newest samples, lengths, errors. A few megabytes
        at most. Requests under way are not in it."""
        rows, generated, remaining, weights = self.samples.newest(SAVED_SAMPLES)
        state: dict[str, NDArray[np.generic]] = {
            "counts": np.array([self.ended_requests, self.since_drift, self.drifts, self.network.steps], np.int64),
            "lengths": np.array(self.lengths, np.int64),
            "samples.rows": rows,
            "samples.generated": generated,
            "samples.remaining": remaining,
            "samples.weights": weights,
            "judged": np.array([astuple(each) for each in self._judged], np.float64).reshape(-1, 4),
            "scales": self.samples.scales(),
        }
        for name, arrays in self.network.arrays().items():
            state |= {f"network.{name}.{index}": array for index, array in enumerate(arrays)}
        for name, band in (("learnt", self.learnt_band), ("residual", self.residual_band)):
            state |= {f"band.{name}.{part}": array for part, array in band.state().items()}
        return state

    def restore(self, state: Mapping[str, NDArray[np.generic]]) -> None:
        """Go on from what `state` of a learner of the same width told. Raises `KeyError` or `ValueError` for anything
        else; it has then learnt nothing yet."""
        fresh = LengthLearner(self.hidden_size)
        counts = [int(count) for count in state["counts"].astype(np.int64)]
        fresh.ended_requests, fresh.since_drift, fresh.drifts, steps = counts
        fresh.lengths.extend(int(length) for length in state["lengths"].astype(np.int64))
        network = {
            name: [state[f"network.{name}.{index}"].astype(np.float32) for index in range(len(arrays))]
            for name, arrays in fresh.network.arrays().items()
        }
        fresh.network.restore(network, steps)
        fresh.samples.restore_scales(state["scales"].astype(np.float32))
        columns = ("samples.rows", "samples.remaining", "samples.weights")
        rows, remaining, weights = (state[name].astype(np.float32) for name in columns)
        fresh.samples.add(rows, state["samples.generated"].astype(np.int32), remaining, weights)
        for name, band in (("learnt", fresh.learnt_band), ("residual", fresh.residual_band)):
            band.restore({part: state[f"band.{name}.{part}"].astype(np.float64) for part in ConformalBand.PARTS})
        fresh._judged.extend(_Judged(*row) for row in state["judged"].astype(np.float64).tolist())
        fresh._by_network = fresh._is_better()
        fresh.validate()
        vars(self).update(vars(fresh))

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken` where what is remembered outgrows its bounds."""
        assert len(self._running) <= MOST_RUNNING, "requests under way are bounded"
        assert all(len(each.rows) <= SAMPLES_OF_REQUEST for each in self._running.values()), "samples are bounded"
        assert self.steps_due <= MOST_STEPS_DUE, "work that waits is bounded"
        assert self.since_drift <= self.ended_requests, "what ended since the last drift has ended"
        self.samples.validate()

    # -- inside

    def _rows(self, requests: RunningRequests) -> NDArray[np.float32]:
        states = requests.states
        assert states.shape == (len(requests.request_ids), self.hidden_size), "states of this model"
        if self._projection is not None:
            states = states @ self._projection
        prompt, generated = requests.prompt_tokens.astype(np.float32), requests.generated_tokens.astype(np.float32)
        counts = np.stack([np.log1p(prompt), np.log1p(generated), prompt, generated, prompt - generated], axis=1)
        rows = np.concatenate([states, counts, requests.repetition], axis=1)
        # A broken model has broken states.
        finite: NDArray[np.float32] = np.nan_to_num(rows.astype(np.float32), posinf=0.0, neginf=0.0)
        return finite

    def _inputs(self, rows: NDArray[np.float32], residual: LengthQuantiles) -> NDArray[np.float32]:
        known = np.log1p(residual.median).astype(np.float32) - np.float32(_TYPICAL_LOG_TOKENS)
        return np.concatenate([self.samples.scaled(rows), known[:, None]], axis=1)

    def _corrected(self, rows: NDArray[np.float32], residual: LengthQuantiles) -> LengthQuantiles:
        if not self.network.steps:
            return residual
        correction = self.network.predict(self._inputs(rows, residual)).astype(np.float64)
        logs = np.log1p(residual.median)[:, None] + correction
        return LengthQuantiles.of_columns(np.expm1(np.minimum(logs, _MOST_LOG_TOKENS)))

    def _smoothed(self, request_ids: Sequence[str], ages: Floats, raw: LengthQuantiles) -> LengthQuantiles:
        """The same with the middle drawn towards what was said of each request before, and the ends along with it."""
        totals = ages + raw.median
        for row, request_id in enumerate(request_ids):
            remembered = self._remembered(request_id)
            if remembered.total_tokens is not None:
                before = max(remembered.total_tokens, ages[row] + 1)
                totals[row] = SMOOTHING * totals[row] + (1 - SMOOTHING) * before
            remembered.total_tokens = float(totals[row])
        factors = np.maximum(totals - ages, 1.0) / raw.median
        return LengthQuantiles.of_columns(raw.columns() * factors[:, None])

    def _is_better(self) -> bool:
        if not self.network.steps or len(self._judged) < FEWEST_REQUESTS:
            return False
        learnt = sum(each.error_tokens for each in self._judged)
        return learnt < sum(each.residual_error_tokens for each in self._judged)

    def _remembered(self, request_id: str) -> _Remembered:
        remembered = self._running.get(request_id)
        if remembered is None:
            remembered = self._running[request_id] = _Remembered()
            if len(self._running) > MOST_RUNNING:
                self._running.popitem(last=False)
        return remembered

    def _remember(self, request_id: str, row: NDArray[np.float32], generated: int, said: Floats) -> None:
        remembered = self._remembered(request_id)
        remembered.seen += 1
        if len(remembered.rows) < SAMPLES_OF_REQUEST:
            remembered.rows.append(row)
            remembered.generated.append(generated)
            remembered.said.append(said)
            return
        place = int(self._draw.integers(remembered.seen))  # reservoir sampling, algorithm R
        if place < SAMPLES_OF_REQUEST:
            remembered.rows[place], remembered.generated[place], remembered.said[place] = row, generated, said

    def _judge(self, said: Floats, remaining: Floats, weight: float) -> None:
        told, learnt, residual = (LengthQuantiles.of_columns(said[:, at : at + 3]) for at in (0, 3, 6))
        self.learnt_band.ended(learnt, remaining)
        self.residual_band.ended(residual, remaining)
        self._judged.append(
            _Judged(
                weight * len(remaining),
                weight * float(np.abs(learnt.median - remaining).sum()),
                weight * float(np.abs(residual.median - remaining).sum()),
                weight * float(told.cover(remaining).sum()),
            )
        )

    def _notice_drift(self) -> bool:
        latest = self._judged[-1]
        shortfall = DRIFT_COVERAGE - latest.covered / latest.samples
        self._shortfall = max(0.0, self._shortfall + shortfall)
        if self.since_drift < FEWEST_REQUESTS:
            self._shortfall = 0.0
        if self._shortfall < DRIFT_SHORTFALL:
            return False
        self._shortfall = 0.0
        self.drifts += 1
        self.since_drift = 0
        latest_lengths = list(self.lengths)[-DRIFT_REQUESTS:]
        self.lengths = deque(latest_lengths, maxlen=REMEMBERED_LENGTHS)
        self._sorted = None
        kept = self.samples.newest(DRIFT_REQUESTS * SAMPLES_OF_REQUEST // 2)
        self.samples = LearntSamples(kept[0].shape[1])
        self.samples.add(*kept)
        self.network = QuantileNetwork.fresh(self.network.inputs, QUANTILES, self.drifts)
        self.learnt_band, self.residual_band = ConformalBand(), ConformalBand()
        self._judged.clear()
        return True

    def _lengths(self) -> NDArray[np.int64]:
        if self._sorted is None:
            self._sorted = np.sort(np.array(self.lengths, np.int64))
        return self._sorted


def _projection(hidden_size: int, seed: int) -> NDArray[np.float32] | None:
    if hidden_size <= WIDEST_STATE:
        return None
    draw = np.random.default_rng(seed)
    gaussian = draw.standard_normal((hidden_size, WIDEST_STATE)).astype(np.float32)
    projection: NDArray[np.float32] = gaussian / np.float32(np.sqrt(hidden_size))
    return projection


def running_requests(
    request_ids: Sequence[str],
    prompt_tokens: Sequence[int],
    generated_tokens: Sequence[int],
    states: NDArray[np.float32],
    repetition: NDArray[np.float32],
) -> RunningRequests:
    """The same from lists."""
    return RunningRequests(
        tuple(request_ids), np.array(prompt_tokens, np.int32), np.array(generated_tokens, np.int32), states, repetition
    )
