"""The artefacts that are served, each from a folder that is watched. A good new one replaces the old one at once; a bad
one is refused and the old one stays."""

import logging
from dataclasses import dataclass
from pathlib import Path

from mesh.errors import ConfigurationError
from services.predictor.artefact import METADATA_FILE, Artefact, load_artefact

log = logging.getLogger(__name__)

FALLBACK = "mean_residual"
"""How workers estimate remaining lengths without a predictor: the mean residual life of requests that ended there."""


@dataclass(slots=True)
class WatchedFolder:
    """One folder, the artefact that was loaded from it last, and why its present content is not in force."""

    path: Path
    artefact: Artefact | None = None
    refused: str = ""
    """Why what lies there is not in force."""
    seen: tuple[int, int, int] | None = None
    """Inode, size and time of the description that was last looked at; it is written last, and replaced whole."""


class ArtefactRegistry:
    """Looks into the folders when told to; does file I/O, so not for an event loop."""

    def __init__(self, folders: tuple[Path, ...]) -> None:
        self.folders = tuple(WatchedFolder(path) for path in folders)
        self.refusals_total = 0
        self.swaps_total = 0

    def reload(self) -> None:
        """Load what has changed in the folders since the last call. A bad folder raises nothing: it is logged, and
        `refused` says why."""
        for folder in self.folders:
            present = _look_of(folder.path / METADATA_FILE)
            if present is None:
                self._note_missing(folder)
            elif present != folder.seen or folder.refused:
                # What is refused may be on its way: a folder is copied file by file.
                folder.seen = present
                self._load(folder)

    def find(self, model: str, fingerprint: str, hidden_size: int) -> Artefact:
        """The artefact of exactly this model. Raises `ConfigurationError`, which says why there is none."""
        loaded = [folder.artefact for folder in self.folders if folder.artefact is not None]
        for artefact in loaded:
            if artefact.metadata.model_fingerprint == fingerprint:
                artefact.check_model(model, fingerprint, hidden_size)
                return artefact
        of_that_name = [artefact for artefact in loaded if artefact.metadata.model == model]
        for artefact in of_that_name or (loaded if len(loaded) == 1 else []):
            artefact.check_model(model, fingerprint, hidden_size)
        names = ", ".join(artefact.name for artefact in loaded) or "none"
        raise ConfigurationError(f"no length predictor is loaded for the model {model!r} (loaded: {names})")

    def _load(self, folder: WatchedFolder) -> None:
        try:
            artefact = load_artefact(folder.path)
        except ConfigurationError as error:
            if str(error) == folder.refused:
                return
            self.refusals_total += 1
            folder.refused = str(error)
            kept = "nothing" if folder.artefact is None else folder.artefact.name
            log.error("an artefact is refused", extra={"reason": str(error), "kept": kept})
            return
        before = "" if folder.artefact is None else folder.artefact.name
        folder.artefact, folder.refused = artefact, ""
        self.swaps_total += 1
        log.info("an artefact is in force", extra={"artefact": artefact.name, "before": before})

    def _note_missing(self, folder: WatchedFolder) -> None:
        """A folder that was emptied goes on to be served; one that was never filled waits."""
        if not folder.refused:
            folder.refused = f"there is no {METADATA_FILE} in {folder.path}; penstock predictor train writes one"
            log.warning("an artefact is missing", extra={"folder": str(folder.path)})
        folder.seen = None


def _look_of(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
