"""One model's instances as the rescheduler may see them, and which it may not. No I/O, no clock."""

from dataclasses import dataclass

from controlplane.model.cluster import ClusterTable
from controlplane.model.instance import InstanceState
from controlplane.policies.rescheduling.parameters import ReschedulerParameters
from controlplane.policies.rescheduling.problem import DecodeInstance
from controlplane.scheduler.rescheduling.decode_loads import DecodeLoads

MISSED_REPORTS = 3
"""Intervals without a report of its requests after which an instance is left out."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodeView:
    """What is known of one model's decoding."""

    model: str
    instances: tuple[DecodeInstance, ...]
    left_out: dict[str, str]
    """Instances whose requests cannot be seen or must not be moved, and why."""
    unheard: int
    """How many of them should have reported their requests and have not."""

    @property
    def requests(self) -> int:
        """Decoding requests on `instances`."""
        return sum(len(instance.load.request_ids) for instance in self.instances)

    @property
    def predicted_requests(self) -> int:
        """Those whose remaining length is predicted."""
        return sum(instance.load.predicted_requests for instance in self.instances)


def decode_view(
    table: ClusterTable,
    loads: DecodeLoads,
    model: str,
    parameters: ReschedulerParameters,
    shunned: frozenset[str],
    now_s: float,
) -> DecodeView:
    """`shunned` are targets that have refused of late; their own requests may still leave."""
    snapshot = table.snapshot(model)
    instances: list[DecodeInstance] = []
    left_out: dict[str, str] = {}
    unheard = 0
    for row in range(0 if snapshot is None else len(snapshot)):
        assert snapshot is not None, "it has rows"
        description = snapshot.instances[row]
        instance_id = description.instance_id
        if not description.phase.decodes:
            continue
        if reason := snapshot.refusal(row):
            left_out[instance_id] = reason
            unheard += snapshot.state(row) is InstanceState.READY
            continue
        heard = loads.get(instance_id, description.incarnation_id)
        if heard is None or now_s - heard.heard_s > MISSED_REPORTS * parameters.interval_s:
            age = "never" if heard is None else f"{now_s - heard.heard_s:.1f} s ago"
            left_out[instance_id] = f"has told of its running requests {age}"
            unheard += 1
            continue
        load = table.load(instance_id)
        if load.transfer_obstacle:
            left_out[instance_id] = f"cannot move requests: {load.transfer_obstacle}"
            continue
        instances.append(
            DecodeInstance(
                instance_id,
                description.kv_blocks * description.block_tokens,
                load.token_interval_ms or load.step_ms,
                instance_id not in shunned,
                heard.load.over(parameters.horizon),
            )
        )
    return DecodeView(model, tuple(instances), left_out, unheard)
