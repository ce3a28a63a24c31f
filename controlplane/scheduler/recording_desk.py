"""What the placement desk tells a recorder."""

from collections.abc import Callable, Mapping

from controlplane.model.cluster import ClusterTable
from controlplane.model.placement import Placement, PlacementRequest
from controlplane.policies.interface import Policy
from controlplane.policies.stages.layout import StageLayout
from controlplane.policies.stages.placement import Stages
from controlplane.recording import events
from controlplane.recording.table import RecordingTable
from controlplane.scheduler.policy_switch import PolicySwitch
from controlplane.scheduler.recorder import Recorder


class RecordedDecisions:
    """Without a recorder it does nothing. `before` each decision, then what came of it."""

    def __init__(self, recorder: Recorder | None, switch: PolicySwitch, table: Callable[[], ClusterTable]) -> None:
        self._recorder = recorder
        self._switch = switch
        self._table = table
        self._configured: Policy | None = None
        self._fallback = ""
        self._layouts: dict[str, StageLayout] = {}
        """By which the configured policy is known to place."""

    def before(self, request: PlacementRequest) -> int:
        """A decision is about to be made; the digest of what it will see."""
        if not self._is_on:
            return 0
        self._tell_policy()
        return events.digest(self._table().snapshot(request.model))

    def placed(self, request: PlacementRequest, placement: Placement | None, seen: int) -> None:
        """None: it was refused."""
        if not self._is_on:
            return
        if placement is None:
            self._tell(events.Placed(self._number, request, snapshot_digest=seen))
            return
        self._tell(
            events.Placed(
                self._number,
                request,
                placement.instance.instance_id,
                placement.decode_instance.instance_id,
                placement.is_decode_open,
                placement.cached_tokens,
                seen,
            )
        )

    def decode_placed(self, request: PlacementRequest, prefill_instance_id: str, chosen_id: str, seen: int) -> None:
        """At the end of a prefill."""
        if self._is_on:
            self._tell(events.DecodePlaced(self._number, request, prefill_instance_id, chosen_id, seen))

    def shown(self, now_s: float) -> None:
        """The policy in force is about to be shown the cluster."""
        if self._is_on:
            self._tell_policy()
            self._tell(events.Observed(self._number, now_s))

    @property
    def _is_on(self) -> bool:
        return self._recorder is not None and self._recorder.is_recording

    @property
    def _number(self) -> int:
        table = self._table()
        assert isinstance(table, RecordingTable), "a recorder makes the tables"
        return table.number

    def _tell(self, event: events.Event) -> None:
        assert self._recorder is not None
        self._recorder.tell(event)

    def _tell_policy(self) -> None:
        switch = self._switch
        if switch.configured is not self._configured:
            self._configured = switch.configured
            self._tell(events.PolicySet(switch.configured.name, switch.configured.parameters.values()))
            self._layouts = {}
        if isinstance(switch.configured, Stages) and switch.configured.layouts != self._layouts:
            self._tell_layouts(switch.configured.layouts)
        if switch.fallback_name != self._fallback:
            former, self._fallback = self._fallback, switch.fallback_name
            self._tell(events.FallbackSet(bool(self._fallback), self._fallback or former))

    def _tell_layouts(self, layouts: Mapping[str, StageLayout]) -> None:
        for model in sorted(layouts.keys() | self._layouts.keys()):
            if layouts.get(model) != self._layouts.get(model):
                self._tell(events.LayoutSet(model, layouts.get(model)))
        self._layouts = dict(layouts)
