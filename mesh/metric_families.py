"""Metrics in Prometheus's text format, family by family, so that those of several processes can stand on one page.

A page names each family once and has all of its samples in a row. Samples of different processes are told apart by the
label `member_id` and are never added up: a sum would fall when a process ends, which `rate()` takes for a reset.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

from penstock.v1 import member_pb2

MEMBER_LABEL: Final = "member_id"


class _One(Collector):
    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family


def metric_families(
    registry: CollectorRegistry, prefix: str, member_id: str, *, leave_out: str | None = None
) -> list[member_pb2.MetricFamily]:
    """The metrics whose names begin with `prefix` and not with `leave_out`, as those of a member; an empty `member_id`
    leaves them without the label."""
    extra = {MEMBER_LABEL: member_id} if member_id else {}
    families: dict[str, Metric] = {}
    for own in registry.collect():
        if not own.name.startswith(prefix) or (leave_out is not None and own.name.startswith(leave_out)):
            continue
        family = families.setdefault(own.name, Metric(own.name, own.documentation, own.type))
        family.samples += [
            sample._replace(labels={**sample.labels, **extra}, exemplar=None)
            for sample in own.samples
            if not sample.name.endswith("_created")  # in the text format they are a family of their own
        ]
    return [member_pb2.MetricFamily(name=name, text=generate_latest(_One(family))) for name, family in families.items()]


def one_page(members: Iterable[Sequence[member_pb2.MetricFamily]]) -> bytes:
    """The families of several members, each under the help and the type that came first."""
    texts: dict[str, list[bytes]] = {}
    for families in members:
        for family in families:
            known = texts.setdefault(family.name, [])
            known.append(_samples(family.text) if known else family.text)
    return b"".join(text for parts in texts.values() for text in parts)


def _samples(text: bytes) -> bytes:
    return b"\n".join(line for line in text.split(b"\n") if not line.startswith(b"#"))
