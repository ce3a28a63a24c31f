"""Spans to an OpenTelemetry collector, by opentelemetry-sdk: OTLP over HTTP, in batches, from a thread of its own.

The one module that imports it, and only where an endpoint is configured (`pip install penstock[tracing]`).
"""

import logging
from typing import Final

from mesh.errors import ConfigurationError
from mesh.tracing import FinishedSpan, SpanContext

try:
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
except ImportError as error:
    raise ConfigurationError(
        f"--otlp-traces-endpoint needs OpenTelemetry's packages ({error}): pip install 'penstock[tracing]'"
    ) from error

MAX_WAITING_SPANS: Final = 4096
"""More are dropped, the oldest first, so that a collector that is away costs nothing but its traces."""
BATCH_SPANS: Final = 512
SEND_EVERY_MS: Final = 2000
TIMEOUT_S: Final = 5
_NANOSECONDS: Final = 1_000_000_000

log = logging.getLogger(__name__)


class OtlpExporter:
    """A `SpanExporter`."""

    def __init__(self, endpoint: str, role: str, member_id: str, incarnation_id: str) -> None:
        """`endpoint`: the whole URL, such as http://127.0.0.1:4318/v1/traces."""
        self._resource = Resource.create(
            {
                "service.name": f"penstock-{role}",
                "service.namespace": "penstock",
                "service.instance.id": f"{member_id}/{incarnation_id}",
            }
        )
        self._scope = InstrumentationScope("penstock")
        self._processor = BatchSpanProcessor(
            OTLPSpanExporter(endpoint, timeout=TIMEOUT_S),
            max_queue_size=MAX_WAITING_SPANS,
            max_export_batch_size=BATCH_SPANS,
            schedule_delay_millis=SEND_EVERY_MS,
        )

    def export(self, span: FinishedSpan) -> None:
        """Take a span."""
        status = trace.Status(trace.StatusCode.ERROR, span.error) if span.error else trace.Status()
        is_request = span.name.startswith("/")
        self._processor.on_end(
            ReadableSpan(
                name=span.name,
                context=_context(span.context),
                parent=None if span.parent is None else _context(span.parent),
                resource=self._resource,
                attributes={f"penstock.{name}": value for name, value in span.attributes.items()},
                kind=trace.SpanKind.SERVER if is_request else trace.SpanKind.INTERNAL,
                instrumentation_scope=self._scope,
                status=status,
                start_time=int(span.start_unix_s * _NANOSECONDS),
                end_time=int(span.end_unix_s * _NANOSECONDS),
            )
        )

    def close(self) -> None:
        """Send what is left, within seconds."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]


def _context(context: SpanContext) -> trace.SpanContext:
    return trace.SpanContext(
        int(context.trace_id, 16),
        int(context.span_id, 16),
        is_remote=False,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED if context.is_sampled else 0),
    )
