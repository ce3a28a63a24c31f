"""A cascade as the mesh is configured with it: a record in the state store that frontends and judges follow."""

from math import isfinite
from typing import Literal

import msgspec

from mesh.errors import ConfigurationError

CASCADES_PREFIX = "/penstock/cascades/"
"""Followed by the cascade's name."""
MAX_TIERS = 8
MAX_RUBRIC_CHARACTERS = 16_000
SPECULATE_ROOM = 4
"""Requests of a frontend on an instance, below which it has spare capacity."""
MAX_SPECULATE_ROOM = 4096
MAX_SCORE = 100.0
"""Judges score from 0."""


class CascadeRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A virtual model, and the models that answer for it."""

    name: str
    """Model name that clients ask for."""
    tiers: tuple[str, ...]
    """Models, smallest first."""
    thresholds: tuple[float, ...]
    """One fewer: an answer of tier i is accepted if it scores at least thresholds[i]; above 100: never."""
    judges: tuple[str, ...] = ("confidence",)
    """Tried in order, until one gives a score."""
    without_judge: Literal["escalate", "accept"] = "escalate"
    """What to do with an answer that none of them could judge."""
    expected_s: tuple[float, ...] = ()
    """What a tier's answer is expected to take; empty: as measured."""
    label: str = ""
    """A strong judge or a checker that says of sampled answers whether they are right; empty: nobody does. Goals need
    one where the first judge is the models' own confidence."""
    rubric: str = ""
    """Instructions to judges and label in place of Penstock's. Those that follow it have its digest in their names:
    scores by different rubrics do not compare."""
    speculate: float = 0.0
    """The next tier is begun ahead once an answer will be escalated with at least this probability; 0: never."""
    speculate_room: int = SPECULATE_ROOM
    """A tier is begun ahead only while one of its instances has fewer requests of the frontend than this."""
    plan_revision: int = 0
    """Of the plan that the thresholds come from; 0: an operator's own."""

    @property
    def key(self) -> str:
        """The record's key in the state store."""
        return CASCADES_PREFIX + self.name

    def checked(self) -> "CascadeRecord":
        """Itself. Raises `ConfigurationError` for what cannot be served."""
        if not self.name or "/" in self.name:
            raise ConfigurationError(f"a cascade needs a name without a slash, got {self.name!r}")
        if not 1 <= len(self.tiers) <= MAX_TIERS or len(set(self.tiers)) < len(self.tiers):
            raise ConfigurationError(f"cascade {self.name}: 1 to {MAX_TIERS} different models are its tiers")
        if self.name in self.tiers:
            raise ConfigurationError(f"cascade {self.name}: it cannot be a tier of its own")
        if len(self.thresholds) != len(self.tiers) - 1:
            raise ConfigurationError(
                f"cascade {self.name}: {len(self.tiers)} tiers need {len(self.tiers) - 1} thresholds, "
                f"got {len(self.thresholds)}"
            )
        if not all(threshold >= 0 and isfinite(threshold) for threshold in self.thresholds):
            raise ConfigurationError(
                f"cascade {self.name}: thresholds are scores from 0 on, and above {MAX_SCORE:g} accept nothing; "
                f"got {self.thresholds}"
            )
        if self.expected_s and len(self.expected_s) != len(self.tiers):
            raise ConfigurationError(f"cascade {self.name}: expected_s needs a time for each tier, or none at all")
        if not all(seconds >= 0 and isfinite(seconds) for seconds in self.expected_s):
            raise ConfigurationError(f"cascade {self.name}: expected_s are times from 0 s on, got {self.expected_s}")
        if len(self.tiers) > 1 and not self.judges:
            raise ConfigurationError(f"cascade {self.name}: name at least one judge, such as confidence")
        if not 0 <= self.speculate <= 1 or not 1 <= self.speculate_room <= MAX_SPECULATE_ROOM:
            raise ConfigurationError(
                f"cascade {self.name}: speculate is a probability from 0 (never) to 1 and speculate_room 1 to "
                f"{MAX_SPECULATE_ROOM} requests, got {self.speculate} and {self.speculate_room}"
            )
        if len(self.rubric) > MAX_RUBRIC_CHARACTERS:
            raise ConfigurationError(
                f"cascade {self.name}: a rubric has at most {MAX_RUBRIC_CHARACTERS} characters, got {len(self.rubric)}"
            )
        if self.label == "confidence":
            raise ConfigurationError(
                f"cascade {self.name}: confidence says how sure a model is and not whether it is right, so it labels "
                "nothing; name a model, an endpoint or a checker"
            )
        return self
