"""Settings of the length predictor."""

from dataclasses import dataclass
from pathlib import Path

from mesh.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class PredictorSettings:
    """Without an artefact the predictor runs and refuses to predict."""

    artefact: tuple[Path, ...] = ()
    """Folder of an artefact that `penstock predictor train` has written or will write; one for each model."""
    artefact_poll_s: float = 1.0
    """A changed artefact is noticed within this time."""

    def __post_init__(self) -> None:
        """Raises `ConfigurationError` for a watch that would never rest."""
        if not self.artefact_poll_s > 0:
            raise ConfigurationError(f"--artefact-poll-s must be above 0, not {self.artefact_poll_s:g}")
