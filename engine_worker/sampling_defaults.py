"""Sampling parameters of requests that name none, as the model's makers recommend them and as vLLM reads them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from controlplane.model.request import SamplingParams
from controlplane.model.sampling import parameters
from mesh.errors import ConfigurationError

FILE: Final = "generation_config.json"
OF_MODEL, NEUTRAL = "auto", "vllm"
_READ: Final = {
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
"""Those that vLLM 0.32 takes from the file (`ModelConfig.get_diff_sampling_param`), and what it calls them."""


def sampling_defaults(model_path: Path, generation_config: str, override: str) -> Mapping[str, Any]:
    """Values by the names of `SamplingParams`; what is not in it has vLLM's own default.

    `generation_config`: `auto` for the model's own, `vllm` for none, or a directory with another one. `override`: a
    JSON object that is put over it. Raises ConfigurationError for what cannot be read, and for values that no request
    could have.
    """
    told: dict[str, Any] = {}
    if generation_config != NEUTRAL:
        directory = model_path if generation_config == OF_MODEL else Path(generation_config)
        told = _from_file(directory / FILE, must_exist=generation_config != OF_MODEL)
    told |= _object(override or "{}", "--override-generation-config")
    declared = parameters(SamplingParams)
    defaults: dict[str, Any] = {}
    for theirs, ours in _READ.items():
        if (value := told.get(theirs)) is None:
            continue
        wanted = declared[ours].type_but_none
        if isinstance(value, bool) or not isinstance(value, (int, float) if wanted is float else int):
            reason: str | None = f"{theirs} must be a number, got {value!r}"
        else:
            reason = declared[ours].refusal(value) if ours != "max_tokens" or value > 0 else f"{theirs} must be above 0"
        if reason is not None:
            raise ConfigurationError(
                f"the model's {FILE} cannot be used: {reason}; give another value by --override-generation-config, or "
                f"--generation-config {NEUTRAL} to do without it"
            )
        defaults[ours] = max(0, value) if ours == "top_k" else wanted(value)
    return defaults


def _from_file(path: Path, *, must_exist: bool) -> dict[str, Any]:
    try:
        return _object(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError as error:
        if must_exist:
            raise ConfigurationError(f"--generation-config: there is no {path}") from error
        return {}
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error


def _object(text: str, origin: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{origin} is no valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{origin} must be a JSON object")
    return content
