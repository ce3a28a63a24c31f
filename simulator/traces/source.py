"""Where a trace comes from: a file, whose format its first line tells, or the built-in synthetic one."""

import gzip
import io
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np

from mesh.errors import TraceError
from simulator.traces.azure import is_azure_header, parse_azure
from simulator.traces.mooncake import ARRIVAL_GRID_S, is_mooncake_line, parse_mooncake
from simulator.traces.request import TraceRequest
from simulator.traces.reshape import clip, scale_lengths, scale_rate, share_prefixes, spread_arrivals
from simulator.traces.synthetic import SyntheticWorkload, synthetic_trace

SYNTHETIC = "synthetic"
_GZIP_MAGIC = b"\x1f\x8b"
_MAX_LINE_CHARS = 8 << 20
"""A longer line is no trace; reading on would only fill the memory."""

Parser = Callable[[Iterable[str]], Iterator[TraceRequest]]


@dataclass(frozen=True, slots=True)
class TraceRecipe:
    """A trace and what is done to it before it is replayed; equal recipes give equal requests."""

    source: str
    """Path of a file, or `synthetic`."""
    seed: int = 0
    clip_start_s: float = 0.0
    clip_end_s: float = float("inf")
    rate_scale: float = 1.0
    length_scale: float = 1.0
    shared_prefix: float = 0.0
    """See `reshape.share_prefixes`."""
    prefix_groups: int = 16


def open_trace(recipe: TraceRecipe) -> Iterator[TraceRequest]:
    """The requests of `recipe`, lazily, in order of arrival. Raises TraceError, also while iterating."""
    spread_rng, share_rng, synthetic_rng = np.random.default_rng(recipe.seed).spawn(3)
    if recipe.source == SYNTHETIC:
        requests = synthetic_trace(_workload(recipe), synthetic_rng)
    else:
        requests = _read(Path(recipe.source), spread_rng)
    requests = clip(requests, recipe.clip_start_s, recipe.clip_end_s)
    requests = scale_lengths(requests, recipe.length_scale)
    if recipe.shared_prefix:
        requests = share_prefixes(requests, recipe.shared_prefix, recipe.prefix_groups, share_rng)
    return scale_rate(requests, recipe.rate_scale)


def _workload(recipe: TraceRecipe) -> SyntheticWorkload:
    if recipe.clip_end_s == float("inf"):
        return SyntheticWorkload()
    return SyntheticWorkload(duration_s=recipe.clip_end_s)


def _read(path: Path, spread_rng: np.random.Generator) -> Iterator[TraceRequest]:
    try:
        with _open_text(path) as text:
            first_line = text.readline(_MAX_LINE_CHARS)
            parser = _parser(path, first_line)
            requests = parser(_lines(first_line, text))
            if parser is parse_mooncake:
                requests = spread_arrivals(requests, ARRIVAL_GRID_S, spread_rng)
            yield from requests
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise TraceError(f"cannot read the trace {path}: {error}") from error


def _open_text(path: Path) -> TextIO:
    with path.open("rb") as probe:
        compressed = probe.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    if compressed:
        return io.TextIOWrapper(gzip.open(path, "rb"), encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _parser(path: Path, first_line: str) -> Parser:
    if is_azure_header(first_line):
        return parse_azure
    if is_mooncake_line(first_line):
        return parse_mooncake
    raise TraceError(
        "line 1 is neither the header of an Azure CSV (TIMESTAMP,ContextTokens,GeneratedTokens) nor one of "
        f"a Mooncake JSONL (timestamp, input_length, output_length, hash_ids): {first_line.strip()[:200]!r}"
    )


def _lines(first_line: str, text: TextIO) -> Iterator[str]:
    line = first_line
    number = 1
    while line:
        if len(line) >= _MAX_LINE_CHARS:
            raise TraceError(f"line {number}: longer than {_MAX_LINE_CHARS} characters")
        yield line
        line = text.readline(_MAX_LINE_CHARS)
        number += 1
