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
from simulator.traces.agentic import is_agentic_line, parse_agentic
from simulator.traces.azure import is_azure_header, parse_azure
from simulator.traces.lengths import is_lengths_header, parse_lengths
from simulator.traces.mooncake import ARRIVAL_GRID_S, is_mooncake_line, parse_mooncake
from simulator.traces.request import TraceRequest
from simulator.traces.reshape import clip, scale_lengths, scale_rate, share_prefixes, spread_arrivals, superpose
from simulator.traces.servegen import is_servegen_line, parse_servegen
from simulator.traces.synthetic import SyntheticWorkload, synthetic_trace

SYNTHETIC = "synthetic"
_GZIP_MAGIC = b"\x1f\x8b"
_MAX_LINE_CHARS = 8 << 20
"""A longer line is no trace; reading on would only fill the memory."""

Parser = Callable[[Iterable[str], np.random.Generator], Iterator[TraceRequest]]


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
    copies: int = 1
    """See `reshape.superpose`."""
    part: str = ""
    """Which part of a list of lengths; see `lengths.parse_lengths`."""


def open_trace(recipe: TraceRecipe) -> Iterator[TraceRequest]:
    """The requests of `recipe`, lazily, in order of arrival. Raises TraceError, also while iterating."""
    parse_rng, share_rng, synthetic_rng, copy_rng = np.random.default_rng(recipe.seed).spawn(4)
    if recipe.source == SYNTHETIC:
        requests = synthetic_trace(_workload(recipe), synthetic_rng)
    else:
        requests = _read(Path(recipe.source), parse_rng, recipe.part)
    requests = clip(requests, recipe.clip_start_s, recipe.clip_end_s)
    if recipe.copies > 1:
        requests = superpose(requests, recipe.copies, copy_rng)
    requests = scale_lengths(requests, recipe.length_scale)
    if recipe.shared_prefix:
        requests = share_prefixes(requests, recipe.shared_prefix, recipe.prefix_groups, share_rng)
    return scale_rate(requests, recipe.rate_scale)


def _workload(recipe: TraceRecipe) -> SyntheticWorkload:
    if recipe.clip_end_s == float("inf"):
        return SyntheticWorkload()
    return SyntheticWorkload(duration_s=recipe.clip_end_s)


def _read(path: Path, rng: np.random.Generator, part: str) -> Iterator[TraceRequest]:
    try:
        with _open_text(path) as text:
            first_line = text.readline(_MAX_LINE_CHARS)
            yield from _parser(first_line, part)(_lines(first_line, text), rng)
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


def _parser(first_line: str, part: str) -> Parser:
    if is_azure_header(first_line):
        return lambda lines, _: parse_azure(lines)
    if is_mooncake_line(first_line):
        return lambda lines, rng: spread_arrivals(parse_mooncake(lines), ARRIVAL_GRID_S, rng)
    if is_agentic_line(first_line):
        return parse_agentic
    if is_servegen_line(first_line):
        return parse_servegen
    if is_lengths_header(first_line):
        return lambda lines, rng: parse_lengths(lines, rng, part)
    raise TraceError(
        "line 1 is neither the header of an Azure CSV (TIMESTAMP,ContextTokens,GeneratedTokens), nor one of a list of "
        "lengths (docs/simulation.md), nor a line of a Mooncake JSONL (timestamp, input_length, output_length, "
        "hash_ids), of a ServeGen JSONL (client, trace, dataset) or of an agentic JSONL (id, block_size, requests): "
        f"{first_line.strip()[:200]!r}"
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
