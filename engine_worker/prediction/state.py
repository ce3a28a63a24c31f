"""Where the remaining lengths of a worker's requests come from just now."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

log = logging.getLogger(__name__)


class LengthSource(StrEnum):
    """Where predictions of remaining lengths come from."""

    OFF = "off"
    """Nobody was asked to."""
    LLM_NATIVE = "llm_native"
    """A trained predictor, from the model's hidden states."""
    LEARNT = "learnt"
    """What a predictor has learnt from the requests that ended."""
    SIMULATED = "simulated"
    """The simulated engine, which knows, through an error model."""
    MEAN_RESIDUAL = "mean_residual"
    """The fallback: the mean residual life of requests that ended here."""


@dataclass(slots=True)
class PredictionState:
    """Changes as predictions succeed and fail; each change is logged once."""

    every_steps: int
    source: LengthSource = LengthSource.OFF
    artefact: str = ""
    reason: str = ""
    """Why the fallback stands in."""
    batches_total: int = 0
    predictions_total: int = 0
    fallback_predictions_total: int = 0
    failures_total: int = 0
    skipped_batches_total: int = 0
    """Captured while a call was under way, and overtaken."""
    loops_total: int = 0
    looping: frozenset[str] = frozenset()
    """Requests whose answers went round in circles when they were last looked at."""
    latency_ms: float = 0.0
    """Duration of the last call to the predictor."""

    def predicted_by(self, artefact: str, *, is_learnt: bool = False) -> None:
        """A predictor has answered with this artefact, or with what it has learnt; logged when that is new."""
        source = LengthSource.LEARNT if is_learnt else LengthSource.LLM_NATIVE
        if self.source is not source or self.artefact != artefact:
            log.info("remaining lengths are predicted", extra={"artefact": artefact, "every_steps": self.every_steps})
        self.source, self.artefact, self.reason = source, artefact, ""

    def note_loops(self, periods_tokens: Mapping[str, int]) -> None:
        """These requests repeat themselves now, in cycles of so many tokens; each is logged and counted once."""
        for request_id in periods_tokens.keys() - self.looping:
            self.loops_total += 1
            log.warning(
                "an answer goes round in circles",
                extra={"request_id": request_id, "period_tokens": periods_tokens[request_id]},
            )
        self.looping = frozenset(periods_tokens)

    def predicted_by_engine(self) -> None:
        """The engine predicts its lengths itself; logged when that is new."""
        if self.source is not LengthSource.SIMULATED:
            log.info("remaining lengths are told by the simulated engine's error model")
        self.source, self.reason = LengthSource.SIMULATED, ""

    def fall_back(self, reason: str) -> None:
        """Nobody predicts, for this reason: the mean residual life stands in. Logged as a warning when the reason is
        new."""
        if self.source is not LengthSource.MEAN_RESIDUAL or self.reason != reason:
            log.warning(
                "remaining lengths are not predicted; the fallback stands in",
                extra={"fallback": LengthSource.MEAN_RESIDUAL.value, "reason": reason},
            )
        self.source, self.artefact, self.reason = LengthSource.MEAN_RESIDUAL, "", reason
