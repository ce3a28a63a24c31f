"""What happened in one simulation, told in the order of virtual time: faults, requests, what the roles logged and said
to each other, what was expected and what came."""

import logging
from typing import Any, Final

from google.protobuf import descriptor_pool, message_factory, text_format

from fault_simulation.grpc_connection import Kind
from fault_simulation.network import Endpoint
from fault_simulation.node import Node
from fault_simulation.nodes import SimulatedMesh
from fault_simulation.run import Outcome, build, run_timeline
from fault_simulation.timeline import Fault, Request, Timeline

MOST_LINES: Final = 4000
LONGEST_TEXT: Final = 160


class _Teller(logging.Handler):
    """Collects lines, each with its time."""

    def __init__(self, mesh: SimulatedMesh, level: int) -> None:
        super().__init__(level)
        self.lines: list[tuple[float, int, str]] = []
        self._mesh = mesh

    def say(self, at_s: float, line: str) -> None:
        """One line."""
        self.lines.append((at_s, len(self.lines), line))

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging."""
        loop = self._mesh.loop
        told = {
            name: value
            for name, value in vars(record).items()
            if name not in _PLAIN and isinstance(value, (str, int, float, bool, list, tuple))
        }
        details = ", ".join(f"{name}={_short(value)}" for name, value in told.items())
        text = f"{loop.current.name} [{record.levelname.lower()}] {record.getMessage()}"
        self.say(loop.now_s, f"{text} ({details})" if details else text)


_PLAIN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "taskName"}


def tell(timeline: Timeline, *, every_message: bool = False) -> str:
    """Simulate a timeline and tell of it; with every message that went over the network, or without."""
    mesh = build(timeline)
    teller = _Teller(mesh, logging.INFO if every_message else logging.WARNING)
    mesh.told = teller
    if every_message:
        _listen(mesh, teller)
    for fault in timeline.faults:
        teller.say(fault.at_s, f"-- fault: {fault_in_words(fault)}")
    for operation in timeline.operations:
        teller.say(operation.at_s, f"-- operator begins: {operation.action}")
    for request in timeline.requests:
        teller.say(request.at_s, f"-- {_request(request)}")
    outcome = run_timeline(timeline, mesh)
    _say_answers(outcome, teller)
    for done in mesh.operator.outcomes:
        teller.say(done.ended_s, f"-- operator: {done.action}: {'' if done.done else 'not done: '}{done.what}")
    for violation in outcome.violations:
        teller.say(violation.at_s, f"!! {violation.who}: {violation.kind}: {violation.detail}")
    lines = [f"{at_s:8.3f}  {line}" for at_s, _, line in sorted(teller.lines)]
    if len(lines) > MOST_LINES and not every_message:
        lines = [*lines[:MOST_LINES], f"... and {len(lines) - MOST_LINES} lines more"]
    return "\n".join([_mesh(timeline), *lines, _verdict(outcome)])


def _listen(mesh: SimulatedMesh, teller: _Teller) -> None:
    reader = _FrameReader()

    def heard(sender: Node, receiver: Node, frame: Any, endpoint: Endpoint) -> None:
        text = reader.read(frame, endpoint)
        if text:
            teller.say(mesh.loop.now_s, f"{sender.name} -> {receiver.name}: {text}")

    mesh.network.on_frame = heard


class _FrameReader:
    """Decodes frames, knowing the method of each stream from its first frame."""

    def __init__(self) -> None:
        self._methods: dict[tuple[int, int], str] = {}
        """By the server's end of the connection, and stream."""
        self._kept: list[Endpoint] = []

    def read(self, frame: Any, endpoint: Endpoint) -> str:
        """What to say of a frame; empty for those that say nothing."""
        if not isinstance(frame, tuple):
            return f"connection ended: {frame.reason}"
        kind, *rest = frame
        if not isinstance(kind, Kind):
            return _short(" ".join(_plain(part) for part in frame))
        if kind in (Kind.PING, Kind.PONG, Kind.SETTINGS, Kind.WINDOW):
            return ""
        if kind is Kind.GO_AWAY:
            return "go away"
        stream = rest[0]
        if kind is Kind.CALL:
            self._kept.append(endpoint)  # so that no other one gets its id
            self._methods[id(endpoint), stream] = rest[1]
            return f"{_method(rest[1])} {_message(rest[1], rest[4], asks=True)}".strip()
        asks = (id(endpoint), stream) in self._methods
        method = self._methods.get((id(endpoint if asks else endpoint.peer), stream), "")
        if kind is Kind.MESSAGE:
            return f"{_method(method)} {_message(method, rest[1], asks=asks)}"
        if kind is Kind.STATUS:
            told = _message(method, rest[4], asks=False) if rest[4] else ""
            return f"{_method(method)} ends: {rest[1]} {rest[2]} {told}".rstrip()
        return f"{_method(method)} {kind.name.lower().replace('_', ' ')}"


def _method(path: str) -> str:
    return path.rpartition("penstock.v1.")[2] or path


def _message(method: str, raw: bytes | None, *, asks: bool) -> str:
    if raw is None:
        return ""
    service, _, name = method.strip("/").partition("/")
    try:
        told = _services().FindServiceByName(service).FindMethodByName(name)
    except KeyError:
        return f"({len(raw)} bytes)"
    message = message_factory.GetMessageClass(told.input_type if asks else told.output_type)()
    message.ParseFromString(raw)
    return _short(text_format.MessageToString(message, as_one_line=True))


def _services() -> Any:
    """The descriptors of all services whose modules are imported."""
    return descriptor_pool.Default()  # type: ignore[no-untyped-call]


def _plain(part: Any) -> str:
    if isinstance(part, bytes):
        return part.decode(errors="replace")
    return "" if isinstance(part, (list, bool)) else str(part)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}..."


def _mesh(timeline: Timeline) -> str:
    topology = timeline.topology
    others = f"{topology.frontends} frontends, {topology.schedulers} schedulers, {topology.monitors} monitors"
    counts = {"planners": topology.planners, "predictors": topology.predictors, "routers": topology.routers}
    others += "".join(f", {count} {name}" for name, count in counts.items() if count)
    workers = ", ".join(topology.phases) + (f", {topology.large} of another model" if topology.large else "")
    by = ", by penstock up" if topology.supervised else ""
    return (
        f"seed {timeline.seed}: {others}, workers: {workers}{by}; policy {topology.policy}, rescheduler "
        f"{topology.rescheduler}, {topology.kv_blocks} KV blocks each"
    )


def fault_in_words(fault: Fault) -> str:
    """What it is and whom it concerns; not when."""
    fields = {name: getattr(fault, name) for name in fault.__struct_fields__ if name != "at_s"}
    told = ", ".join(
        f"{name}={' '.join(value) if isinstance(value, tuple) else value}" for name, value in fields.items()
    )
    return f"{type(fault).__name__.lower()} {told}"


def _request(request: Request) -> str:
    body = {name: _short(value) for name, value in request.body.items() if name != "stream_options"}
    client = "" if request.behaviour == "reads" else f"; its client {request.behaviour} after {request.after_s} s"
    return f"request {request.number} to frontend-{request.frontend}: {request.path} {body}{client}"


def _say_answers(outcome: Outcome, teller: _Teller) -> None:
    for asked in outcome.asked:
        for attempt in asked.attempts:
            if attempt.ended_s is None or (attempt.is_refused and attempt is not asked.attempts[0]):
                continue
            answer = attempt.answer
            told = answer.error or ("left" if asked.has_left else "whole")
            lengths = ", ".join(str(len(answer.choices[index].text)) for index in sorted(answer.choices)) or "0"
            teller.say(
                attempt.ended_s,
                f"-- {asked.name} at {attempt.frontend} ended ({answer.request_id}): {answer.status}, {told}; "
                f"{lengths} characters of {', '.join(str(len(choice.text)) for choice in asked.expected_as(answer))}",
            )


def _verdict(outcome: Outcome) -> str:
    if not outcome.violations:
        return "nothing was violated"
    return "\n".join(["violated:", *(f"  {violation}" for violation in outcome.violations)])
