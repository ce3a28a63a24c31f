"""Where a model's checkpoint is: a directory, or a model of the Hugging Face Hub, which huggingface_hub fetches once
and keeps in its cache."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from mesh.errors import ConfigurationError

HUGGING_FACE_ID: Final = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?\Z", re.ASCII
)
"""ORGANISATION/MODEL, with @REVISION (a branch, tag or commit) behind it or not."""

_TEXT: Final = ("*.json", "*.jinja", "*.txt", "*.model", "*.model.v*", "*.tiktoken", "*.py")
_WEIGHTS: Final = ("*.safetensors",)
_OLD_WEIGHTS: Final = ("*.bin",)
_IGNORED: Final = ("original/*", "onnx/*", "consolidated*")
"""The same weights once more in other forms."""

Fetch = Callable[..., str]
"""`huggingface_hub.snapshot_download`."""


def is_hugging_face_id(source: str) -> bool:
    """Whether this names a model of the Hub: no directory of that name is here, and it has the form of an id."""
    return HUGGING_FACE_ID.match(source) is not None and not Path(source).is_dir()


def locate_checkpoint(source: str, *, with_weights: bool = True, fetch: Fetch | None = None) -> Path:
    """The directory of a checkpoint: `source` itself, or the snapshot in the Hub's cache, which is fetched if it is not
    there (HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE mean what they mean to huggingface_hub). May take as long
    as gigabytes take. Raises ConfigurationError."""
    if not is_hugging_face_id(source):
        return Path(source)
    found = HUGGING_FACE_ID.match(source)
    assert found is not None
    repo, revision = found["repo"], found["revision"]
    folder = _fetched(repo, revision, (*_TEXT, *(_WEIGHTS if with_weights else ())), fetch)
    if with_weights and not any(folder.rglob("*.safetensors")):
        folder = _fetched(repo, revision, (*_TEXT, *_OLD_WEIGHTS), fetch)
        if not any(folder.rglob("*.bin")):
            raise ConfigurationError(f"{source} holds no weights (*.safetensors or *.bin) in {folder}: fetch it anew")
    return folder


def locate_files(source: str, patterns: tuple[str, ...]) -> Path:
    """The same for the files of these names only, of a model of the Hub. Raises ConfigurationError."""
    found = HUGGING_FACE_ID.match(source)
    assert found is not None, "is_hugging_face_id() has been asked"
    return _fetched(found["repo"], found["revision"], patterns, None)


def _fetched(repo: str, revision: str | None, patterns: tuple[str, ...], fetch: Fetch | None) -> Path:
    from huggingface_hub import errors, snapshot_download  # takes half a second, which other starts need not wait for

    get = fetch or snapshot_download
    try:
        return Path(get(repo, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(_IGNORED)))
    except errors.GatedRepoError as error:
        raise ConfigurationError(
            f"{repo} is gated: accept its terms at huggingface.co/{repo} and set HF_TOKEN to a token of that account"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigurationError(f"{repo} has no revision {revision!r}: give a branch, a tag or a commit") from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigurationError(
            f"there is no model {repo} on the Hugging Face Hub, or it is private: check its name, or set HF_TOKEN"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise ConfigurationError(
            f"{repo} is not in the cache of the Hugging Face Hub, and the Hub cannot be reached (or HF_HUB_OFFLINE is "
            f"set): fetch it where there is a network (`hf download {repo}`), point HF_HOME at that cache, or give a "
            "directory with the checkpoint"
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise ConfigurationError(f"{repo} could not be fetched from the Hugging Face Hub: {error}") from error
