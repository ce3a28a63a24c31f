"""Spans: what a traceparent says, what is recorded, and what leaves the process."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import ConfigurationError
from mesh.role import RoleSettings, _otlp_exporter
from mesh.tracing import NO_TRACES, FinishedSpan, SpanContext, Tracer

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-1] + "0"


class Recorded:
    """A `SpanExporter` that keeps what it gets."""

    def __init__(self) -> None:
        self.spans: list[FinishedSpan] = []

    def export(self, span: FinishedSpan) -> None:
        self.spans.append(span)

    def close(self) -> None:
        pass


class Chance:
    """Ids from one seed."""

    def __init__(self) -> None:
        self._random = random.Random(1)

    def generator(self) -> random.Random:
        return self._random

    def token_hex(self, random_bytes: int) -> str:
        return self._random.randbytes(random_bytes).hex()


class SetClock:
    """Stands at 100 s, which is the Unix time 1000 s, until it is set."""

    def __init__(self) -> None:
        self.s = 100.0

    def now_s(self) -> float:
        return self.s

    def unix_s(self) -> float:
        return 900.0 + self.s

    async def sleep(self, duration_s: float) -> None:
        raise AssertionError("nobody sleeps here")


@pytest.mark.parametrize(
    ("header", "is_right"),
    [
        (PARENT, True),
        (UNSAMPLED, True),
        (PARENT.replace("00-", "cc-", 1) + "-what-comes-later", True),
        (PARENT + "-more", False),
        (PARENT.replace("00-", "ff-", 1), False),
        (PARENT.upper(), False),
        (PARENT[:-1], False),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", False),
        (f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01", False),
        ("", False),
    ],
)
def test_a_traceparent_is_read_as_the_standard_says(header: str, is_right: bool) -> None:
    assert (SpanContext.parse(header) is not None) == is_right


@given(st.text(max_size=80) | st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", fullmatch=True))
def test_what_is_read_is_written_alike(header: str) -> None:
    context = SpanContext.parse(header)
    assert context is None or SpanContext.parse(str(context)) == context


def test_a_span_is_a_part_of_its_parent_and_takes_its_time() -> None:
    recorded, clock = Recorded(), SetClock()
    tracer = Tracer(recorded, clock, Chance())
    with tracer.span("/v1/completions", PARENT, start_s=99.5) as outer:
        outer.set(model="demo")
        clock.s = 101.0
        with tracer.child("place", outer.traceparent) as inner:
            clock.s = 102.5
    place, whole = recorded.spans
    assert (place.start_unix_s, place.end_unix_s) == (1001.0, 1002.5)
    assert (whole.start_unix_s, whole.end_unix_s) == (999.5, 1002.5)
    assert whole.parent == SpanContext.parse(PARENT)
    assert place.parent == whole.context
    assert str(place.context) == inner.traceparent
    assert {span.context.trace_id for span in recorded.spans} == {PARENT[3:35]}
    assert whole.attributes == {"model": "demo"}


def test_an_error_is_told_and_an_end_counts_once() -> None:
    recorded = Recorded()
    tracer = Tracer(recorded, SetClock(), Chance())
    with pytest.raises(ValueError, match="wrong"), tracer.span("hop"):
        raise ValueError("wrong")
    with tracer.span("other") as span:
        span.end("first")
    assert [span.error for span in recorded.spans] == ["ValueError: wrong", "first"]


def test_what_its_client_does_not_want_recorded_is_not() -> None:
    recorded = Recorded()
    tracer = Tracer(recorded, SetClock(), Chance())
    with tracer.span("hop", UNSAMPLED) as span, tracer.child("inner", span.traceparent) as inner:
        assert not span.is_recorded
        assert inner.traceparent.endswith("-00")
    with tracer.child("of nothing", ""):
        pass
    assert not recorded.spans


def test_a_share_of_the_others_is_recorded() -> None:
    recorded = Recorded()
    tracer = Tracer(recorded, SetClock(), Chance(), share=0.25)
    for _ in range(400):
        tracer.span("hop").end()
    assert 60 < len(recorded.spans) < 140


def test_without_an_endpoint_the_client_s_goes_on_as_it_is() -> None:
    with NO_TRACES.span("hop", PARENT) as span, NO_TRACES.child("inner", span.traceparent) as inner:
        inner.set(a=1)
        assert inner.traceparent == span.traceparent == PARENT
    NO_TRACES.close()


@pytest.mark.parametrize(
    ("endpoint", "share", "message"),
    [("collector:4318", 1.0, "give a URL"), ("http://localhost:1", 1.5, "from 0 to 1")],
)
def test_wrong_settings_say_what_to_give(endpoint: str, share: float, message: str) -> None:
    settings = RoleSettings("embedded:", "x", otlp_traces_endpoint=endpoint, otlp_traces_share=share)
    with pytest.raises(ConfigurationError, match=message):
        _otlp_exporter(settings, "frontend", "1")


@contextmanager
def collector() -> Iterator[tuple[str, list[bytes], Event]]:
    """What an OpenTelemetry collector gets at its URL."""
    got: list[bytes] = []
    came = Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()
            came.set()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", got, came
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.live
async def test_spans_reach_a_collector() -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with collector() as (url, got, came):
        settings = RoleSettings("embedded:", "frontend-0", otlp_traces_endpoint=url)
        tracer = Tracer(_otlp_exporter(settings, "frontend", "abc"), SetClock(), Chance())
        with tracer.span("/v1/completions", PARENT, start_s=99.0) as span:
            span.set(model="demo", status=200)
            tracer.child("place", span.traceparent).end("nobody is there")
        await asyncio.to_thread(tracer.close)
        assert came.wait(5.0)
    (resource,) = ExportTraceServiceRequest.FromString(got[0]).resource_spans
    named = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
    assert named["service.name"] == "penstock-frontend"
    assert named["service.instance.id"] == "frontend-0/abc"
    spans = {span.name: span for span in resource.scope_spans[0].spans}
    whole, place = spans["/v1/completions"], spans["place"]
    assert whole.trace_id.hex() == PARENT[3:35]
    assert whole.parent_span_id.hex() == PARENT[36:52]
    assert place.parent_span_id == whole.span_id
    assert whole.end_time_unix_nano - whole.start_time_unix_nano == 1_000_000_000
    assert place.status.message == "nobody is there"
    assert {attribute.key for attribute in whole.attributes} == {"penstock.model", "penstock.status"}
