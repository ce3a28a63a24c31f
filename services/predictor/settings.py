"""Settings of the length predictor."""

from dataclasses import dataclass
from pathlib import Path

from mesh.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class PredictorSettings:
    """A model with an artefact is predicted by it, others by what is learnt of them."""

    artefact: tuple[Path, ...] = ()
    """Folder of an artefact that `penstock predictor train` has written or will write; one for each model."""
    artefact_poll_s: float = 1.0
    """A changed artefact is noticed within this time."""

    learn: bool = True
    """Learn the lengths of models without an artefact while they are served; else refuse to predict them."""
    learnt_dir: Path | None = None
    """Directory where what was learnt outlives a restart; without one it is forgotten."""
    learn_share: float = 0.05
    """Part of one core's time that learning may take, above 0 and at most 1."""
    learnt_save_s: float = 60.0
    """What was learnt is saved this often, and at the end."""

    def __post_init__(self) -> None:
        """Raises `ConfigurationError` for a watch that would never rest, and for no time to learn in."""
        if not 0 < self.learn_share <= 1:
            raise ConfigurationError(f"--learn-share must be above 0 and at most 1, not {self.learn_share:g}")
        if not self.learnt_save_s > 0:
            raise ConfigurationError(f"--learnt-save-s must be above 0, not {self.learnt_save_s:g}")
        if not self.artefact_poll_s > 0:
            raise ConfigurationError(f"--artefact-poll-s must be above 0, not {self.artefact_poll_s:g}")
