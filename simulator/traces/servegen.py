"""ServeGen workloads (Alibaba): JSONL, a client a line, from which requests are drawn.

A client has a rate and a distribution of inter-arrival times (Gamma or Weibull) for each window of 600 s, and
distributions of prompt and answer lengths for longer windows. Lengths are drawn independently, since the workload
does not say how they go together.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from mesh.errors import TraceError
from simulator.traces.request import TraceRequest

WINDOW_S = 600.0

_Positive = Annotated[float, msgspec.Meta(gt=0)]
_Window = tuple[float, Annotated[float, msgspec.Meta(ge=0)], float, Literal["Gamma", "Weibull"], _Positive, _Positive]
_Shares = dict[str, Annotated[float, msgspec.Meta(ge=0)]]


class _LengthShares(msgspec.Struct, frozen=True):
    input_tokens: _Shares
    output_tokens: _Shares


class _Client(msgspec.Struct, frozen=True):
    client: int
    trace: tuple[_Window, ...]
    dataset: dict[str, _LengthShares | None] | None


class _Lengths:
    """A distribution of token counts, as arrays."""

    __slots__ = ("_shares", "_tokens")

    def __init__(self, shares: _Shares) -> None:
        tokens = np.array([max(1, round(float(name))) for name in shares], dtype=np.int64)
        weights = np.array(list(shares.values()))
        if not len(tokens) or weights.sum() <= 0:
            raise ValueError("a distribution of lengths without any length")
        self._tokens = tokens
        self._shares = np.cumsum(weights / weights.sum())

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        rows = np.minimum(np.searchsorted(self._shares, rng.random(count), side="right"), len(self._tokens) - 1)
        drawn: list[int] = self._tokens[rows].tolist()
        return drawn


class _Source:
    """One client: what it sends in each window."""

    def __init__(self, client: _Client) -> None:
        self.windows = {int(window[0] // WINDOW_S): window for window in client.trace if window[1] > 0}
        lengths = {float(start): shares for start, shares in (client.dataset or {}).items() if shares is not None}
        self._starts_s = np.array(sorted(lengths))
        self._lengths = [
            (_Lengths(lengths[start].input_tokens), _Lengths(lengths[start].output_tokens))
            for start in self._starts_s.tolist()
        ]

    @property
    def has_lengths(self) -> bool:
        """Without any, what it sends is not known."""
        return bool(self._lengths)

    def draw(self, number: int, rng: np.random.Generator) -> list[tuple[float, int, int]]:
        """(arrival in s, prompt tokens, answer tokens) of window `number`."""
        start_s, rate_per_s, _, kind, shape, scale = self.windows[number]
        gaps_s = _gaps_s(kind, shape, scale, rate_per_s, rng)
        # The window cuts a gap anywhere: the first arrival comes after a part of one.
        times_s = start_s + np.cumsum(gaps_s) - gaps_s[0] * rng.random()
        times_s = times_s[times_s < start_s + WINDOW_S]
        row = max(int(np.searchsorted(self._starts_s, start_s, side="right")) - 1, 0)
        prompts, answers = self._lengths[row]
        count = len(times_s)
        return list(zip(times_s.tolist(), prompts.draw(rng, count), answers.draw(rng, count), strict=True))


def is_servegen_line(line: str) -> bool:
    """Whether `line`, the first of a file, is of this format."""
    try:
        msgspec.json.decode(line, type=_Client)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return False
    return True


def parse_servegen(lines: Iterable[str], rng: np.random.Generator) -> Iterator[TraceRequest]:
    """Requests drawn by `rng`, window after window, in order of arrival. Clients without lengths are left out.

    Raises TraceError with the line number for a malformed line.
    """
    decoder = msgspec.json.Decoder(_Client)
    sources: list[_Source] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            source = _Source(decoder.decode(line))
        except (msgspec.DecodeError, ValueError) as error:
            raise TraceError(f"line {number}: {error}, in {line.strip()[:200]!r}") from error
        if source.has_lengths:
            sources.append(source)
    for window in sorted({window for source in sources for window in source.windows}):
        drawn = [each for source in sources if window in source.windows for each in source.draw(window, rng)]
        for arrival_s, input_tokens, output_tokens in sorted(drawn):
            yield TraceRequest(arrival_s, input_tokens, output_tokens)


def _gaps_s(kind: str, shape: float, scale: float, rate_per_s: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Enough gaps to fill a window, of the given kind, their mean scaled to the rate."""
    mean = shape * scale if kind == "Gamma" else scale * math.gamma(1 + 1 / shape)
    gaps_s: NDArray[np.float64] = np.zeros(0)
    while gaps_s[1:].sum() <= WINDOW_S:
        count = max(16, math.ceil(1.2 * rate_per_s * WINDOW_S))
        drawn = rng.gamma(shape, scale, count) if kind == "Gamma" else scale * rng.weibull(shape, count)
        gaps_s = np.concatenate((gaps_s, drawn / mean / rate_per_s))
    return gaps_s
