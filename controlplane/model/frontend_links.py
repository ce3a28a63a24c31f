"""The workers that a frontend says it is connected to. No I/O."""

from collections.abc import Iterable, Mapping

from controlplane.model.instance import InstanceDescription

NOBODY: frozenset[str] = frozenset()
MAX_LINKS = 8192
"""Workers in one report; a frontend with more tells of the first ones."""


class FrontendLinks:
    """Of one frontend. Before its first report nothing is known, and every instance counts as reachable."""

    def __init__(self) -> None:
        self.frontend_id = ""
        """Empty before its first report."""
        self._connected: Mapping[str, str] | None = None
        self._unreachable: dict[str, tuple[tuple[InstanceDescription, ...], frozenset[str]]] = {}
        """By model, with the instances that it was made for: those change seldom, and are asked for with each
        placement."""

    @property
    def connected(self) -> Mapping[str, str]:
        """Incarnation of each connected worker, by instance."""
        return self._connected or {}

    def report(self, workers: Iterable[tuple[str, str]], frontend_id: str = "") -> None:
        """Instance and incarnation of every worker that the frontend is connected to now, and who it is."""
        self.frontend_id = frontend_id
        self._connected = dict(workers)
        self._unreachable.clear()

    def unreachable(self, model: str, instances: tuple[InstanceDescription, ...]) -> frozenset[str]:
        """Those of a model's instances that a request of this frontend cannot be sent to. Another incarnation of a
        connected worker is no obstacle: requests are addressed to whichever lives."""
        if self._connected is None:
            return NOBODY
        known = self._unreachable.get(model)
        if known is None or known[0] is not instances:
            missing = frozenset(each.instance_id for each in instances if each.instance_id not in self._connected)
            known = self._unreachable[model] = (instances, missing)
        return known[1]
