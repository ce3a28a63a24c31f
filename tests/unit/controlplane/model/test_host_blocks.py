"""What instances could load from their hosts."""

from collections.abc import Sequence

import numpy as np
import pytest

from controlplane.model.cluster import ClusterTable
from controlplane.model.instance import InstanceDescription, InstanceState, KvBlocks, KvTier, LoadReport
from controlplane.model.kv_costs import KvCosts, datasheet_kv_costs, with_measured
from controlplane.model.placement import PlacementRequest
from controlplane.policies.place import place
from controlplane.policies.registry import create_policy

CHAIN = list(range(1, 9))
BLOCK_TOKENS = 16


def joined(table: ClusterTable, *instance_ids: str, model: str = "m") -> None:
    for instance_id in instance_ids:
        table.joined(
            InstanceDescription(
                instance_id=instance_id,
                incarnation_id="1",
                address="",
                model=model,
                model_path="",
                engine="simulated",
                block_tokens=BLOCK_TOKENS,
                kv_blocks=100,
                max_model_len_tokens=1000,
                max_batch_requests=8,
                max_step_tokens=512,
            )
        )
        table.reported(instance_id, "1", LoadReport(), InstanceState.READY)


def on_host(
    table: ClusterTable, instance_id: str, stored: Sequence[int], removed: Sequence[int] = (), *, clear: bool = False
) -> None:
    change = KvBlocks(tuple(stored), tuple(removed), clear, KvTier.HOST)
    assert table.cached(instance_id, "1", change) == 0


def host_tokens(table: ClusterTable) -> list[int] | None:
    snapshot = table.snapshot("m")
    assert snapshot is not None
    tokens = table.known_tokens(snapshot, CHAIN)[1]
    table.validate()
    return None if tokens is None else tokens.tolist()


def test_each_instance_sees_its_own_host() -> None:
    table = ClusterTable()
    joined(table, "a", "b", "c")
    assert host_tokens(table) is None
    for instance_id in ("a", "b"):
        on_host(table, instance_id, CHAIN[:4], clear=True)
    table.cached("a", "1", KvBlocks(tuple(CHAIN[:5])))
    table.cached("c", "1", KvBlocks(tuple(CHAIN[:2])))
    assert host_tokens(table) == [5 * BLOCK_TOKENS, 4 * BLOCK_TOKENS, 2 * BLOCK_TOKENS]


def test_what_was_evicted_is_forgotten_and_what_is_lost_goes_with_its_instance() -> None:
    table = ClusterTable()
    joined(table, "a", "b")
    for instance_id in ("a", "b"):
        on_host(table, instance_id, CHAIN)
    on_host(table, "a", [], [CHAIN[3]])
    assert host_tokens(table) == [3 * BLOCK_TOKENS, 8 * BLOCK_TOKENS]
    on_host(table, "b", CHAIN[:1], clear=True)
    assert host_tokens(table) == [3 * BLOCK_TOKENS, BLOCK_TOKENS]
    table.lost("a", "1")
    assert host_tokens(table) == [BLOCK_TOKENS]
    while table.index.sweep(1000):
        pass
    joined(table, "a")
    assert host_tokens(table) == [0, BLOCK_TOKENS]
    assert (table.host_blocks.held("a"), table.host_blocks.held("b")) == (0, 1)


def test_a_disk_counts_as_far_as_it_reaches() -> None:
    table = ClusterTable()
    joined(table, "a", "b", "c")
    on_host(table, "a", CHAIN[:3])
    for instance_id, blocks in (("a", 6), ("b", 2)):
        assert table.cached(instance_id, "1", KvBlocks(tuple(CHAIN[:blocks]), tier=KvTier.DISK)) == 0
    table.cached("b", "1", KvBlocks(tuple(CHAIN[:4])))
    assert host_tokens(table) == [6 * BLOCK_TOKENS, 4 * BLOCK_TOKENS, 0]
    assert (table.host_blocks.held("a"), table.disk_blocks.held("a")) == (3, 6)
    table.cached("a", "1", KvBlocks(removed=tuple(CHAIN[4:6]), tier=KvTier.DISK))
    assert host_tokens(table) == [4 * BLOCK_TOKENS, 4 * BLOCK_TOKENS, 0]
    table.lost("a", "1")
    assert host_tokens(table) == [4 * BLOCK_TOKENS, 0]


def test_a_placement_says_what_is_loaded() -> None:
    table = ClusterTable()
    joined(table, "a", "b")
    on_host(table, "b", CHAIN[:6])
    table.cached("b", "1", KvBlocks(tuple(CHAIN[:2])))
    for instance_id in ("a", "b"):
        table.kv_costed(instance_id, "1", datasheet_kv_costs(0, pulls=False, loads=instance_id == "b"))
    request = PlacementRequest("r", "m", 8 * BLOCK_TOKENS + 1, 0.0, CHAIN)
    placement = place(table, create_policy("penstock"), request)
    assert placement.instance.instance_id == "b"
    assert (placement.cached_tokens, placement.loaded_tokens) == (2 * BLOCK_TOKENS, 4 * BLOCK_TOKENS)
    snapshot = table.snapshot("m")
    assert snapshot is not None
    assert np.array_equal(snapshot.unreported_prefill_tokens, [0, 2 * BLOCK_TOKENS + 1])


@pytest.mark.parametrize(("measured_ms", "expected_ms"), [(0.0, 1.0), (1.1, 1.0), (0.5, 0.5), (3.0, 3.0)])
def test_measured_loads_are_news_when_they_differ(measured_ms: float, expected_ms: float) -> None:
    known = KvCosts(load_token_ms=1.0)
    assert with_measured(known, pull_token_ms=measured_ms, load_token_ms=measured_ms).load_token_ms == expected_ms
    assert with_measured(KvCosts(), pull_token_ms=measured_ms, load_token_ms=measured_ms) == KvCosts()


def test_instances_that_forget_their_caches_are_not_mistaken_for_each_other() -> None:
    """Each stands at another place of the index then, and the snapshot's instances are the same."""
    table = ClusterTable()
    joined(table, "a", "b")
    for instance_id in ("a", "b"):
        on_host(table, instance_id, CHAIN[:1])
        table.cached(instance_id, "1", KvBlocks(tuple(CHAIN[:3])))
    assert host_tokens(table) == [3 * BLOCK_TOKENS] * 2
    table.cached("a", "1", KvBlocks(tuple(CHAIN[:2]), cleared=True))
    assert host_tokens(table) == [2 * BLOCK_TOKENS, 3 * BLOCK_TOKENS]
    on_host(table, "b", CHAIN[:5], clear=True)
    assert host_tokens(table) == [2 * BLOCK_TOKENS, 5 * BLOCK_TOKENS]
    on_host(table, "b", [], clear=True)
    assert host_tokens(table) == [2 * BLOCK_TOKENS, 3 * BLOCK_TOKENS]


def test_models_have_caches_of_their_own() -> None:
    table = ClusterTable()
    joined(table, "a")
    joined(table, "z", model="other")
    on_host(table, "a", CHAIN)
    table.cached("z", "1", KvBlocks(tuple(CHAIN[:2])))
    for _ in range(2):
        assert host_tokens(table) == [len(CHAIN) * BLOCK_TOKENS]
        other = table.snapshot("other")
        assert other is not None
        held, loadable = table.known_tokens(other, CHAIN)
        assert (held.tolist(), loadable) == ([2 * BLOCK_TOKENS], None)
