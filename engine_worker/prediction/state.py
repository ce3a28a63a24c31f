"""Where the remaining lengths of a worker's requests come from just now."""

import logging
from dataclasses import dataclass
from enum import StrEnum

log = logging.getLogger(__name__)


class LengthSource(StrEnum):
    """Where predictions of remaining lengths come from."""

    OFF = "off"
    """Nobody was asked to."""
    LLM_NATIVE = "llm_native"
    """A trained predictor, from the model's hidden states."""
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
    latency_ms: float = 0.0
    """Duration of the last call to the predictor."""

    def predicted_by(self, artefact: str) -> None:
        """A predictor has answered with this artefact; logged when that is new."""
        if self.source is not LengthSource.LLM_NATIVE or self.artefact != artefact:
            log.info("remaining lengths are predicted", extra={"artefact": artefact, "every_steps": self.every_steps})
        self.source, self.artefact, self.reason = LengthSource.LLM_NATIVE, artefact, ""

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
