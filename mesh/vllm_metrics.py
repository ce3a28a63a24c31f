"""vLLM's metric names beside our own, so that dashboards and autoscalers made for vLLM work.

A metric is declared once, under our name, with vLLM's beside it where there is one. Each of vLLM's names comes from one
role only: what an engine does from workers, what clients see from frontends. So a sum over the metrics ports of all
processes counts nothing twice; the endpoint's /metrics has all of them on one page (`services/frontend/mesh_metrics`).
"""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

PREFIX: Final = "vllm:"
ENGINE: Final[Mapping[str, str]] = MappingProxyType({"engine": "0"})
"""vLLM numbers the engines of a server; an instance is one, and `member_id` tells instances apart."""
NO_LABELS: Final[Mapping[str, str]] = MappingProxyType({})


def renamed(own: Metric, name: str, labels: Mapping[str, str]) -> Metric:
    """The same samples under vLLM's name (without its prefix), with its labels: our `model` is its `model_name`."""
    twin = Metric(PREFIX + name, own.documentation, own.type)
    for sample in own.samples:
        if sample.name.endswith("_created"):
            continue
        theirs = {("model_name" if key == "model" else key): value for key, value in sample.labels.items()}
        suffix = sample.name.removeprefix(own.name)
        twin.samples.append(Sample(twin.name + suffix, {**ENGINE, **labels, **theirs}, sample.value))
    return twin


class VllmNames(Collector):
    """What some of our metrics are under vLLM's names, read when Prometheus asks."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str] = NO_LABELS) -> None:
        """`labels`: those that our metrics do not have themselves."""
        self._labels = labels
        self._names: list[tuple[MetricWrapperBase, str]] = []
        registry.register(self)

    def add(self, own: MetricWrapperBase, name: str) -> None:
        """Tell of this one as `vllm:NAME`, too."""
        self._names.append((own, name))

    def describe(self) -> Iterable[Metric]:
        """Nothing ahead of time."""
        return ()

    def collect(self) -> Iterator[Metric]:
        for own, name in self._names:
            for family in own.collect():
                yield renamed(family, name, self._labels)
