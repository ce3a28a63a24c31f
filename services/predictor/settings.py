"""What the length predictor can be told."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PredictorSettings:
    """Without an artefact the predictor runs and refuses to predict."""

    artefact: tuple[Path, ...] = ()
    """Folder of an artefact that `penstock predictor train` has written or will write; one for each model."""
    artefact_poll_s: float = 1.0
    """A changed artefact is noticed within this time."""
