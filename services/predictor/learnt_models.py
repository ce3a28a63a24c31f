"""What is learnt of the lengths of each model's answers while they are served, and kept over restarts."""

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from controlplane.prediction.length_learner import LearnerStanding, LengthLearner, RunningRequests
from controlplane.prediction.length_quantiles import LengthQuantiles
from mesh.errors import ConfigurationError

log = logging.getLogger(__name__)

FORMAT: Final = 1
MOST_MODELS: Final = 16
"""Each takes up to some 20 MB."""


class LearntModel(msgspec.Struct, frozen=True, order=True):
    """Whose answers are learnt from: another checkpoint, or states of another width, is another one."""

    model: str
    fingerprint: str
    hidden_size: int

    @property
    def name(self) -> str:
        """In answers and logs, where an artefact has its version."""
        return f"{self.model}@learnt"


class LearntModels:
    """One learner for each model that was asked about; does file I/O and computes, so not for an event loop."""

    def __init__(self, folder: Path | None) -> None:
        """Without a folder a restart forgets all."""
        self._folder = folder
        self._learners: dict[LearntModel, LengthLearner] = {}
        self._saved_at: dict[LearntModel, int] = {}
        self.drifts_total = 0

    def predict(
        self, model: LearntModel, requests: RunningRequests, ended: Sequence[tuple[str, int]]
    ) -> LengthQuantiles | None:
        """First learn of the requests that `ended`, with how many tokens; then say how long the others still run. None
        before any has ended. Raises ConfigurationError for one model too many."""
        learner = self._learner(model)
        for request_id, output_tokens in ended:
            if learner.ended(request_id, output_tokens):
                self.drifts_total += 1
                log.error(
                    "lengths have drifted: predicted ranges miss, what was learnt is forgotten",
                    extra={"model": model.name, "ended_requests": learner.ended_requests},
                )
        return learner.predict(requests) if requests.request_ids else None

    def learn(self) -> bool:
        """One step of each model that has one due, some milliseconds each; False if none had."""
        learnt = [learner.learn() for learner in self._learners.values()]
        return any(learnt)

    def standings(self) -> dict[LearntModel, LearnerStanding]:
        """How good the predictions of each model were."""
        return {model: learner.standing for model, learner in sorted(self._learners.items())}

    def save(self) -> None:
        """Write what has changed since the last time. A disk that fails is logged; what is served goes on."""
        if self._folder is None:
            return
        for model, learner in self._learners.items():
            if self._saved_at.get(model) == learner.ended_requests:
                continue
            text = msgspec.json.encode(model).decode()
            content = save(learner.state(), {"format": str(FORMAT), "model": text})
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                file = self._file(model)
                partial = file.with_name(f".{file.name}.partial")
                partial.write_bytes(content)
                os.replace(partial, file)
            except OSError as error:
                log.error("what was learnt of lengths is not saved", extra={"model": model.name, "reason": str(error)})
                continue
            self._saved_at[model] = learner.ended_requests

    def _learner(self, model: LearntModel) -> LengthLearner:
        learner = self._learners.get(model)
        if learner is None:
            if len(self._learners) >= MOST_MODELS:
                raise ConfigurationError(
                    f"lengths of {MOST_MODELS} models are learnt here already, {model.name} is one too many: start "
                    "another mesh for it or train an artefact (penstock predictor train)"
                )
            learner = self._learners[model] = LengthLearner(model.hidden_size)
            self._restore(model, learner)
        return learner

    def _restore(self, model: LearntModel, learner: LengthLearner) -> None:
        """A file that cannot be used is logged, and learning begins anew."""
        file = None if self._folder is None else self._file(model)
        if file is None or not file.exists():
            return
        try:
            learner.restore(_read(file, model))
        except (ConfigurationError, KeyError, ValueError) as error:
            log.error("what was learnt of lengths cannot be used", extra={"file": str(file), "reason": str(error)})
            return
        self._saved_at[model] = learner.ended_requests
        log.info("lengths were learnt before", extra={"model": model.name, "ended_requests": learner.ended_requests})

    def _file(self, model: LearntModel) -> Path:
        assert self._folder is not None
        digest = hashlib.sha256(msgspec.json.encode(model)).hexdigest()[:16]
        return self._folder / f"{digest}.safetensors"


def _read(file: Path, model: LearntModel) -> dict[str, NDArray[np.generic]]:
    """Raises `ConfigurationError` for one that is damaged, of another format or another model."""
    try:
        with safe_open(file, framework="np") as content:
            metadata = content.metadata() or {}
            names = content.keys()
            arrays = {name: content.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(f"{file} cannot be read ({error}): delete it") from error
    if metadata.get("format") != str(FORMAT) or metadata.get("model") != msgspec.json.encode(model).decode():
        raise ConfigurationError(f"{file} was written by another version or for another model: delete it")
    return arrays
