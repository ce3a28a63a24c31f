"""Placement problems in a line: one instance for each load, and how many of the request's blocks each has cached."""

from collections.abc import Sequence

from hypothesis import strategies as st

from controlplane.model.cluster import ClusterTable
from controlplane.model.instance import LoadReport
from controlplane.model.placement import PlacementProblem, PlacementRequest
from tests.unit.controlplane.builders import cache, cached_tokens, cluster, report, request

CHAIN = (1, 2, 3, 4, 5, 6)
LONG = tuple(range(100, 164))
"""The chain of a prompt of 1024 tokens."""

LOADS = st.lists(
    st.builds(
        LoadReport,
        running_requests=st.integers(0, 3),
        queued_requests=st.integers(0, 3),
        queued_prefill_tokens=st.integers(0, 500),
        running_tokens=st.integers(0, 2000),
    ),
    min_size=1,
    max_size=6,
)
HELD = st.lists(st.integers(0, len(CHAIN)), min_size=6, max_size=6)


def problem(loads: Sequence[LoadReport], held: Sequence[int] = (), prompt_tokens: int = 100) -> PlacementProblem:
    table = cluster(*(f"i{row}" for row in range(len(loads))))
    for row, load in enumerate(loads):
        report(table, f"i{row}", load)
    for row, blocks in enumerate(held[: len(loads)]):
        cache(table, f"i{row}", *CHAIN[:blocks])
    return asked(table, request(prompt_tokens=prompt_tokens, blocks=CHAIN))


def asked(table: ClusterTable, wanted: PlacementRequest) -> PlacementProblem:
    snapshot = table.snapshot(wanted.model)
    assert snapshot is not None
    return PlacementProblem(
        wanted, snapshot, cached_tokens(table, snapshot, wanted.block_hashes), snapshot.placeable.copy()
    )
