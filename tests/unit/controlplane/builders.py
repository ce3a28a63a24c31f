"""Short ways to say what a test is about."""

from collections.abc import Sequence

from controlplane.model.cluster import ClusterTable
from controlplane.model.cluster_limits import ClusterLimits
from controlplane.model.instance import InstanceDescription, InstancePhase, InstanceState, KvBlocks, LoadReport
from controlplane.model.placement import PlacementRequest
from controlplane.model.snapshot import Integers, Snapshot
from controlplane.planning.instance_profile import InstanceProfile, InstanceSizes, StepCoefficients, StepFit
from controlplane.planning.qoe import QoeFit, QoeModel
from controlplane.prediction.running_tokens import DecodePoint
from controlplane.prediction.ttft import TtftCurve

BLOCK_TOKENS = 16


def instance(
    instance_id: str,
    incarnation_id: str = "1",
    model: str = "m",
    phase: InstancePhase = InstancePhase.ANY,
    kv_blocks: int = 1000,
) -> InstanceDescription:
    return InstanceDescription(
        instance_id,
        incarnation_id,
        address=f"127.0.0.1:{instance_id}",
        model=model,
        model_path="/models/m",
        engine="simulated",
        block_tokens=BLOCK_TOKENS,
        kv_blocks=kv_blocks,
        max_model_len_tokens=4096,
        max_batch_requests=64,
        max_step_tokens=2048,
        phase=phase,
    )


def cluster(*instance_ids: str, limits: ClusterLimits | None = None) -> ClusterTable:
    """Ready, idle instances of model m."""
    table = ClusterTable(limits or ClusterLimits(max_indexed_blocks=1000))
    for instance_id in instance_ids:
        table.joined(instance(instance_id))
        report(table, instance_id)
    return table


def report(
    table: ClusterTable,
    instance_id: str,
    load: LoadReport | None = None,
    state: InstanceState = InstanceState.READY,
    admitted: tuple[str, ...] = (),
    ended: tuple[str, ...] = (),
) -> None:
    table.reported(instance_id, "1", load or LoadReport(), state, admitted, ended)


def cache(table: ClusterTable, instance_id: str, *blocks: int) -> None:
    table.cached(instance_id, "1", KvBlocks(stored=blocks))


def cached_tokens(table: ClusterTable, snapshot: Snapshot, blocks: Sequence[int]) -> Integers:
    """Leading prompt tokens that each instance of the (current) snapshot holds, or is going to hold by prompts that
    were placed there, in its order."""
    cached, _ = table.with_expected(snapshot, blocks, table.held_tokens(snapshot, blocks), now_s=0.0)
    return cached


def request(
    request_id: str = "r",
    prompt_tokens: int = 100,
    blocks: tuple[int, ...] = (),
    now_s: float = 0.0,
    model: str = "m",
    excluded: frozenset[str] = frozenset(),
) -> PlacementRequest:
    return PlacementRequest(request_id, model, prompt_tokens, now_s, blocks, excluded_instance_ids=excluded)


def profile(token_ms: float, model: str = "m") -> InstanceProfile:
    """Of an instance whose prompts take 5 ms and `token_ms` a token, and whose steps 20 ms at 1000 running tokens and
    60 ms at 9000."""
    return InstanceProfile(
        "simulated",
        model,
        "simulated",
        InstanceSizes(BLOCK_TOKENS, 1000, 4096, 64, 2048),
        StepFit(StepCoefficients(), 1, 1, 0.0, 0.0),
        TtftCurve(5.0, token_ms, 0.0),
        (DecodePoint(1000, 20.0), DecodePoint(9000, 60.0)),
        QoeFit(QoeModel(0.0, 0.0, 0.0, 0.0, 0.0), 1, 1, 0.0, 0.0),
    )
