"""A sampled workload as lines of JSON: what the planner is given, and what live sampling writes.

First line: {"rate_per_s": 8.0, "models": ["small", "large"]}. Every other line is a request that was answered and
judged on every model: {"input_tokens": 310, "output_tokens": [120, 480], "scores": [55, 90]}, and, where the truth is
known, "quality": [0, 100].
"""

from collections.abc import Iterable

import msgspec
import numpy as np

from controlplane.planning.cascade.sample import CascadeSample
from mesh.errors import TraceError

MAX_REQUESTS = 100_000


class WorkloadHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the whole workload."""

    rate_per_s: float
    models: tuple[str, ...]
    """Smallest first."""


class WorkloadRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One request on every model."""

    input_tokens: int
    output_tokens: tuple[int, ...]
    scores: tuple[float, ...]
    quality: tuple[float, ...] | None = None


def read_workload(lines: Iterable[bytes]) -> tuple[tuple[str, ...], CascadeSample]:
    """(models, sample). Raises `TraceError`, naming the line, for what is not in this form."""
    header: WorkloadHeader | None = None
    requests: list[WorkloadRequest] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if len(requests) == MAX_REQUESTS:
            raise TraceError(f"line {number}: a workload has at most {MAX_REQUESTS} requests; sample it")
        try:
            if header is None:
                header = msgspec.json.decode(line, type=WorkloadHeader)
                continue
            request = msgspec.json.decode(line, type=WorkloadRequest)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise TraceError(f"line {number} of the workload: {error}") from error
        _check_widths(number, request, len(header.models))
        requests.append(request)
    if header is None or not requests:
        raise TraceError("the workload has no requests: it needs a header line, and a line for each request")
    if len({request.quality is None for request in requests}) > 1:
        raise TraceError("the workload gives the true quality of some requests only: give it for all or for none")
    return header.models, _sample(header, requests)


def write_workload(models: tuple[str, ...], sample: CascadeSample) -> list[bytes]:
    """Its lines; `read_workload` reads them."""
    lines = [msgspec.json.encode(WorkloadHeader(sample.rate_per_s, models))]
    for row in range(sample.requests):
        request = WorkloadRequest(
            input_tokens=int(sample.input_tokens[row]),
            output_tokens=tuple(sample.output_tokens[row].tolist()),
            scores=tuple(sample.scores[row].tolist()),
            quality=None if sample.quality is None else tuple(sample.quality[row].tolist()),
        )
        lines.append(msgspec.json.encode(request))
    return lines


def _check_widths(number: int, request: WorkloadRequest, models: int) -> None:
    widths = {len(request.output_tokens), len(request.scores)}
    if request.quality is not None:
        widths.add(len(request.quality))
    if widths != {models}:
        raise TraceError(f"line {number} of the workload needs a value for each of the {models} models, got {request}")


def _sample(header: WorkloadHeader, requests: list[WorkloadRequest]) -> CascadeSample:
    return CascadeSample(
        scores=np.array([request.scores for request in requests], np.float64),
        input_tokens=np.array([request.input_tokens for request in requests], np.int64),
        output_tokens=np.array([request.output_tokens for request in requests], np.int64),
        rate_per_s=header.rate_per_s,
        quality=None
        if requests[0].quality is None
        else np.array([request.quality for request in requests], np.float64),
    )
