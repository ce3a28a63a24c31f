"""Labels that are brought in from elsewhere, such as people's."""

from collections.abc import Iterable

import msgspec

from controlplane.model.cascade_record import MAX_SCORE
from controlplane.planning.cascade.workload import MAX_REQUESTS, WorkloadRequest, WorkloadWindow
from mesh.errors import TraceError


class LabelledRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What somebody says of one request's answers."""

    request_id: str
    quality: tuple[float | None, ...]
    """Of each model, 0 to 100; None: nobody says."""


def with_labels(window: WorkloadWindow, lines: Iterable[bytes], label: str) -> WorkloadWindow:
    """The workload with the labels of these lines of JSON in place of its own; `label` says whose they are.

    Raises `TraceError` for lines that are no labels, or of requests that the workload does not have.
    """
    told: dict[str, LabelledRequest] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if len(told) == MAX_REQUESTS:
            raise TraceError(f"line {number} of the labels: a workload has at most {MAX_REQUESTS} requests")
        try:
            request = msgspec.json.decode(line, type=LabelledRequest)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise TraceError(f"line {number} of the labels: {error}") from error
        if len(request.quality) != len(window.models):
            raise TraceError(f"line {number} of the labels needs a quality for each of {', '.join(window.models)}")
        if not all(0 <= quality <= MAX_SCORE for quality in request.quality if quality is not None):
            raise TraceError(f"line {number} of the labels: qualities go from 0 to {MAX_SCORE:g}")
        told[request.request_id] = request
    unknown = told.keys() - {request.request_id for request in window.requests}
    if unknown or not told:
        raise TraceError(
            f"the labels are of {len(unknown)} requests that the workload does not have ({sorted(unknown)[:3]}): they "
            "go with the file of the same export"
            if unknown
            else "there are no labels"
        )
    requests = tuple(_with_label(request, told.get(request.request_id)) for request in window.requests)
    return WorkloadWindow(window.models, window.rate_per_s, requests, window.judge, label)


def _with_label(request: WorkloadRequest, told: LabelledRequest | None) -> WorkloadRequest:
    return request if told is None else msgspec.structs.replace(request, quality=told.quality)
