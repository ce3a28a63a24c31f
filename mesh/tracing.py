"""Spans of a request's hops, for OpenTelemetry. Off, and next to free, unless an endpoint is configured.

A hop is told by the W3C's `traceparent` (https://www.w3.org/TR/trace-context/) what it is a part of: the client's goes
on through frontends, workers and moves, also where this mesh records nothing itself. Ids, times and threads of
opentelemetry-sdk are not used, so that a simulated mesh stays deterministic; `mesh.otlp` sends what is recorded here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Protocol, Self

from mesh.runtime import Clock, Entropy

TRACEPARENT_HEADER: Final = "traceparent"
_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_SAMPLED: Final = 0x01

Attribute = str | int | float | bool


@dataclass(frozen=True, slots=True)
class SpanContext:
    """Which span, of which trace, and whether somebody wants to see it."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits."""
    is_sampled: bool

    @classmethod
    def parse(cls, traceparent: str) -> "SpanContext | None":
        """None for what is no `traceparent`: the standard has whoever gets one begin a trace of its own."""
        match = _TRACEPARENT.fullmatch(traceparent)
        if match is None:
            return None
        version, trace_id, span_id, flags, rest = match.groups()
        if version == "ff" or (version == "00" and rest) or not int(trace_id, 16) or not int(span_id, 16):
            return None
        return cls(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))

    def __str__(self) -> str:
        """The header's value."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}"


@dataclass(frozen=True, slots=True)
class FinishedSpan:
    """One hop, from its beginning to its end."""

    name: str
    context: SpanContext
    parent: SpanContext | None
    start_unix_s: float
    end_unix_s: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    error: str = ""
    """Why it failed; empty: it did not."""


class SpanExporter(Protocol):
    """Where finished spans go. Never blocks; drops what is too much."""

    def export(self, span: FinishedSpan) -> None:
        """Take a span."""

    def close(self) -> None:
        """Send what is left, within seconds; may block."""


class Span:
    """A hop that goes on; ends with the `with` block, or by `end`, once."""

    __slots__ = ("_attributes", "_context", "_parent", "_tracer", "name", "start_s", "traceparent")

    def __init__(
        self,
        tracer: "Tracer",
        name: str,
        parent: SpanContext | None,
        context: SpanContext | None,
        traceparent: str,
        start_s: float,
    ) -> None:
        self._tracer = tracer
        self.name = name
        self._parent = parent
        self._context = context
        """None: it is not recorded."""
        self.start_s = start_s
        """On the clock's `now_s`."""
        self._attributes: dict[str, Attribute] = {}
        self.traceparent = traceparent
        """What is told to hops that are a part of this one."""

    @property
    def is_recorded(self) -> bool:
        """Whether it will be exported."""
        return self._context is not None

    def set(self, **attributes: Attribute) -> None:
        """Say more of it; `a_b` becomes `penstock.a_b`."""
        if self._context is not None:
            self._attributes |= attributes

    def end(self, error: str = "", *, at_s: float | None = None) -> None:
        """It is over; more than once is no harm. `at_s`: on the clock's `now_s`; by default now."""
        context, self._context = self._context, None
        if context is not None:
            self._tracer.finish(self.name, context, self._parent, self.start_s, self._attributes, error, at_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end("" if error is None else f"{type(error).__name__}: {error}"[:256])


class Tracer:
    """Makes the spans of one process."""

    def __init__(self, exporter: SpanExporter | None, clock: Clock, entropy: Entropy, share: float = 1.0) -> None:
        """`exporter` None: nothing is recorded. `share`: of the requests that come without a `traceparent`, how many
        are."""
        self._exporter = exporter
        self._clock = clock
        self._entropy = entropy
        self._share = share

    @property
    def is_on(self) -> bool:
        """Whether anything is recorded."""
        return self._exporter is not None

    def span(self, name: str, traceparent: str = "", *, start_s: float | None = None) -> Span:
        """A hop of what `traceparent` names, or the first one of a new trace. `start_s`: on the clock's `now_s`; by
        default now."""
        if self._exporter is None:
            return Span(self, name, None, None, traceparent, 0.0)
        parent = SpanContext.parse(traceparent)
        is_sampled = self._draws() if parent is None else parent.is_sampled
        trace_id = self._entropy.token_hex(16) if parent is None else parent.trace_id
        context = SpanContext(trace_id, self._entropy.token_hex(8), is_sampled)
        started_s = self._clock.now_s() if start_s is None else start_s
        return Span(self, name, parent, context if is_sampled else None, str(context), started_s)

    def child(self, name: str, traceparent: str) -> Span:
        """A hop of what `traceparent` names; not recorded where it names nothing."""
        return self.span(name, traceparent) if traceparent else Span(self, name, None, None, "", 0.0)

    def finish(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        start_s: float,
        attributes: Mapping[str, Attribute],
        error: str,
        end_s: float | None = None,
    ) -> None:
        """Export a span that ends at `end_s` of the clock's `now_s`, by default now."""
        assert self._exporter is not None, "spans are only recorded for an exporter"
        now_s, unix_s = self._clock.now_s(), self._clock.unix_s()
        if end_s is not None and end_s < now_s:
            now_s, unix_s = end_s, unix_s - (now_s - end_s)
        self._exporter.export(
            FinishedSpan(name, context, parent, unix_s - max(0.0, now_s - start_s), unix_s, dict(attributes), error)
        )

    def close(self) -> None:
        """Send what is left; may block for seconds."""
        if self._exporter is not None:
            self._exporter.close()

    def _draws(self) -> bool:
        return self._share >= 1.0 or int(self._entropy.token_hex(4), 16) < self._share * (1 << 32)


class _NoClock:
    """Of a tracer that records nothing."""

    def now_s(self) -> float:
        raise AssertionError("a tracer without an exporter asks for no time")

    unix_s = now_s

    async def sleep(self, duration_s: float) -> None:
        raise AssertionError("a tracer does not sleep")


class _NoEntropy:
    """Of a tracer that records nothing."""

    def generator(self) -> Any:
        raise AssertionError("a tracer without an exporter draws nothing")

    def token_hex(self, random_bytes: int) -> str:
        raise AssertionError("a tracer without an exporter draws nothing")


NO_TRACES: Final = Tracer(None, _NoClock(), _NoEntropy())
"""For processes without an endpoint, and for tests."""
