"""Collected samples on disk: a folder with one description and parts that are each written whole or not at all."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from controlplane.prediction.length_samples import LengthSamples, Split, joined, split_of
from mesh.errors import ConfigurationError

DESCRIPTION_FILE: Final = "dataset.json"
PART_FILES: Final = "part-*.safetensors"


class DatasetDescription(msgspec.Struct, frozen=True):
    """What a folder of samples was collected from; a second run goes on only with the same one."""

    model: str
    model_fingerprint: str
    hidden_size: int
    every_tokens: int
    """A sample of each request at every so many generated tokens, beginning at none."""
    source: str
    """Which prompts, for people."""
    seed: int
    temperature: float
    max_tokens: int
    dtype: str
    part_requests: int
    """Requests of one part; the last may have fewer."""


@dataclass(frozen=True, slots=True)
class CollectedRequest:
    """A finished request with its sampled hidden states."""

    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    was_cut: bool
    """It ended at the limit of its length, not by itself."""
    generated_tokens: tuple[int, ...]
    """Of each of its samples."""
    states: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Dataset:
    """All collected samples, by split."""

    description: DatasetDescription
    splits: dict[Split, LengthSamples]
    prompts: dict[int, tuple[int, ...]]
    """Token ids by the number of the request."""
    requests: dict[Split, int]
    cut_requests: frozenset[int]
    """Numbers of those that ended at the limit of their length, not by themselves."""
    mean_output_tokens: float


@dataclass(frozen=True, slots=True)
class AnsweredRequests:
    """All samples in the order of their requests, with the answers."""

    samples: LengthSamples
    output_token_ids: list[list[int]]
    """Of each request that has samples, in order."""


class DatasetFolder:
    """Collected data in a folder: a description, and numbered parts of which each is written at once or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, description: DatasetDescription) -> frozenset[int]:
        """Begin or go on; returns the numbers of the parts that are there. Raises `ConfigurationError` if the folder
        holds another dataset."""
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / DESCRIPTION_FILE
        if file.exists():
            known = self.description()
            if known != description:
                raise ConfigurationError(
                    f"{self.path} holds samples of another run ({_difference(known, description)}): choose another "
                    "folder or give the options that it was begun with"
                )
        else:
            _write(file, msgspec.json.format(msgspec.json.encode(description), indent=2))
        return frozenset(int(part.stem.removeprefix("part-")) for part in self._parts())

    def description(self) -> DatasetDescription:
        """Raises `ConfigurationError` if there is none."""
        file = self.path / DESCRIPTION_FILE
        try:
            return msgspec.json.decode(file.read_bytes(), type=DatasetDescription)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigurationError(f"{file}: {error}; collect samples first (penstock predictor collect)") from error

    def write_part(self, number: int, requests: list[CollectedRequest]) -> None:
        """Write part `number`; it appears under its name only when it is complete."""
        partial = self.path / f".part-{number:05d}.partial"
        save_file(_columns(requests), partial)
        os.replace(partial, self.path / f"part-{number:05d}.safetensors")

    def load(self, split_seed: int = 0) -> Dataset:
        """Everything, split by request. Raises `ConfigurationError` for a folder without samples of each split."""
        description = self.description()
        by_split: dict[Split, list[LengthSamples]] = {"train": [], "validation": [], "test": []}
        requests: dict[Split, int] = {"train": 0, "validation": 0, "test": 0}
        prompts: dict[int, tuple[int, ...]] = {}
        outputs: list[int] = []
        cut: list[int] = []
        for part in self._parts():
            columns = _read(part)
            ends = np.cumsum(columns["prompt_lengths"])
            split_of_request: list[Split] = []
            first = len(prompts)
            for prompt in np.split(columns["prompt_token_ids"], ends[:-1]):
                token_ids = tuple(prompt.tolist())
                prompts[len(prompts)] = token_ids
                split_of_request.append(split_of(token_ids, split_seed))
            cut += (np.flatnonzero(columns["was_cut"]) + first).tolist()
            outputs += columns["output_tokens"].tolist()
            for split in by_split:
                chosen = np.array([name == split for name in split_of_request])
                requests[split] += int(chosen.sum())
                by_split[split].append(_samples(columns, first).only(chosen[columns["requests"]]))
        missing = [name for name, parts in by_split.items() if not sum(map(len, parts))]
        if missing:
            raise ConfigurationError(f"{self.path} has no samples for {', '.join(missing)}: collect more requests")
        splits = {name: joined(parts) for name, parts in by_split.items()}
        return Dataset(description, splits, prompts, requests, frozenset(cut), float(np.mean(outputs)))

    def answered(self) -> AnsweredRequests:
        """Everything, with the answers. Raises `ConfigurationError` for a folder without samples, or of a version that
        did not keep answers."""
        parts, answers, first = list[LengthSamples](), list[list[int]](), 0
        for part in self._parts():
            columns = _read(part)
            if "output_token_ids" not in columns:
                raise ConfigurationError(f"{part} holds no answers: delete it and collect again")
            parts.append(_samples(columns, first))
            ends = np.cumsum(columns["output_tokens"])
            answers += [answer.tolist() for answer in np.split(columns["output_token_ids"], ends[:-1])]
            first += len(ends)
        if not parts:
            raise ConfigurationError(f"{self.path} has no samples: collect some (penstock predictor collect)")
        return AnsweredRequests(joined(parts), answers)

    def _parts(self) -> list[Path]:
        return sorted(self.path.glob(PART_FILES))


def _columns(requests: list[CollectedRequest]) -> dict[str, NDArray[np.generic]]:
    samples = [len(request.generated_tokens) for request in requests]
    return {
        "states": np.concatenate([request.states for request in requests]),
        "generated_tokens": np.concatenate([np.array(request.generated_tokens, np.int32) for request in requests]),
        "requests": np.repeat(np.arange(len(requests), dtype=np.int32), samples),
        "prompt_token_ids": np.concatenate([np.array(request.prompt_token_ids, np.int32) for request in requests]),
        "prompt_lengths": np.array([len(request.prompt_token_ids) for request in requests], np.int32),
        "output_tokens": np.array([len(request.output_token_ids) for request in requests], np.int32),
        "output_token_ids": np.concatenate([np.array(request.output_token_ids, np.int32) for request in requests]),
        "was_cut": np.array([request.was_cut for request in requests], np.uint8),
    }


def _samples(columns: dict[str, NDArray[np.int32]], first_request: int) -> LengthSamples:
    of_request = columns["requests"]
    return LengthSamples(
        states=columns["states"].astype(np.float32, copy=False),
        prompt_tokens=columns["prompt_lengths"][of_request],
        generated_tokens=columns["generated_tokens"],
        remaining_tokens=columns["output_tokens"][of_request] - columns["generated_tokens"],
        requests=of_request + np.int32(first_request),
    )


def _read(part: Path) -> dict[str, NDArray[np.int32]]:
    try:
        columns: dict[str, NDArray[np.int32]] = load_file(part)
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(f"{part} cannot be read ({error}); delete it and collect again") from error
    return columns


def _difference(known: DatasetDescription, asked: DatasetDescription) -> str:
    names = [name for name in known.__struct_fields__ if getattr(known, name) != getattr(asked, name)]
    return ", ".join(f"{name} {getattr(known, name)!r}, asked for {getattr(asked, name)!r}" for name in names)


def _write(file: Path, content: bytes) -> None:
    partial = file.with_name(f".{file.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, file)
