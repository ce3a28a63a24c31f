"""The last samples of a cascade, kept for whoever wants to plan with them or to label them (pure)."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import msgspec

from controlplane.planning.cascade.workload import WorkloadRequest

MAX_KEPT = 1000
PAGE_BYTES = 1 << 20
"""Of one answer of the router; a sample that is larger by itself comes alone."""


class SampleText(msgspec.Struct, frozen=True):
    """What a sample reads like: what people need to label it."""

    request_id: str
    prompt: str
    answers: tuple[str | None, ...]
    """Of each tier; None: it was not there."""


@dataclass(frozen=True, slots=True)
class KeptSample:
    """A sample as lines of JSON."""

    number: int
    """Counted up from 1."""
    line: bytes
    """A `WorkloadRequest`."""
    text: bytes
    """A `SampleText`; empty where texts are not kept."""


class KeptSamples:
    """Of one cascade and its present judges. Texts are kept only if the operator of the router wants that: prompts are
    the clients'."""

    def __init__(self, keeps_texts: bool) -> None:
        self.keeps_texts = keeps_texts
        self.rate_per_s = 0.0
        """Of the last window in which requests came."""
        self._samples: deque[KeptSample] = deque(maxlen=MAX_KEPT)
        self._numbers = count(1)

    def add(self, request: WorkloadRequest, prompt: str, answers: Sequence[str | None]) -> None:
        """Keep a sample that every tier has answered; others can be planned for by nobody else."""
        if not request.is_complete:
            return
        text = b""
        if self.keeps_texts:
            text = msgspec.json.encode(SampleText(request.request_id, prompt, tuple(answers)))
        self._samples.append(KeptSample(next(self._numbers), msgspec.json.encode(request), text))

    def page(self, after: int) -> tuple[KeptSample, ...]:
        """The next samples behind that number; none: there are no more."""
        page: list[KeptSample] = []
        size = 0
        for sample in self._samples:
            if sample.number <= after:
                continue
            size += len(sample.line) + len(sample.text)
            if page and size > PAGE_BYTES:
                break
            page.append(sample)
        return tuple(page)
