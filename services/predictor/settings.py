"""What the length predictor can be told."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PredictorSettings:
    """Nothing yet: no artefact can be loaded in this version."""
