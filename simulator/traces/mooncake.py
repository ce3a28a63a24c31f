"""The Mooncake traces: JSONL of timestamp (ms), input_length, output_length, hash_ids.

Published with Mooncake (Qin et al., FAST 2025). A hash id names a block of 512 prompt tokens together with
everything before it.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec

from mesh.errors import TraceError
from simulator.traces.request import TraceRequest

BLOCK_TOKENS = 512
ARRIVAL_GRID_S = 3.0
"""Published arrivals are rounded to this grid (give or take a few ms); see `reshape.spread_arrivals`."""


_BlockId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class _Line(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[_BlockId, ...]


def is_mooncake_line(line: str) -> bool:
    """Whether `line`, the first of a file, is of this format."""
    try:
        msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return False
    return True


def parse_mooncake(lines: Iterable[str]) -> Iterator[TraceRequest]:
    """Requests in file order, at the arrival times of the file.

    Raises TraceError with the line number for a malformed line and for a time before the previous one.
    """
    decoder = msgspec.json.Decoder(_Line)
    previous_s = 0.0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            request = _request(decoder.decode(line))
        except (msgspec.DecodeError, ValueError) as error:
            raise TraceError(f"line {number}: {error}, in {line.strip()[:200]!r}") from error
        if request.arrival_s < previous_s:
            raise TraceError(f"line {number}: arrives before the line above; sort the trace by timestamp")
        previous_s = request.arrival_s
        yield request


def _request(line: _Line) -> TraceRequest:
    blocks = -(-line.input_length // BLOCK_TOKENS)
    if len(line.hash_ids) > blocks:
        raise ValueError(
            f"{line.input_length} tokens fill {blocks} blocks, but {len(line.hash_ids)} hash_ids are given"
        )
    return TraceRequest(
        arrival_s=line.timestamp / 1000,
        input_tokens=line.input_length,
        output_tokens=line.output_length,
        prefix_block_ids=line.hash_ids,
        block_tokens=BLOCK_TOKENS if line.hash_ids else 0,
    )
