"""What `penstock status` says of instances beside its table."""

import io

import pytest
from rich.console import Console

from services.cli.rank_status import ranks_table
from services.cli.status_tables import instances_table, obstacle_lines, pull_lines, roles_table


def test_an_instance_that_cannot_move_requests_has_a_line() -> None:
    instances = [
        {"instance_id": "a", "load": {"transfer_obstacle": "eth0 was made anew"}},
        {"instance_id": "b", "load": {"transfer_obstacle": ""}},
        {"instance_id": "c", "load": {}},
        {"instance_id": "d"},
    ]
    assert obstacle_lines(instances) == ["a cannot move requests: eth0 was made anew"]


def _drawn(table: object, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(table)
    return out.getvalue()


@pytest.mark.parametrize(("width", "is_narrow"), [(80, True), (160, False)])
def test_tables_fit_the_terminal_and_cut_nothing(width: int, is_narrow: bool) -> None:
    role = {"role": "scheduler", "member_id": "scheduler", "health": "serving", "address": "127.0.0.1:40123"}
    role |= {"metrics_address": "127.0.0.1:40124", "lease": "0123456789abcdef"}
    roles = _drawn(roles_table([{**role, "leads": ["pools", "rescheduler"]}], is_narrow=is_narrow), width)
    assert "127.0.0.1:40123" in roles
    assert ("0123456789abcdef" in roles) == (not is_narrow)
    load = {"running_requests": 12, "decoding_requests": 8, "queued_requests": 3, "kv_blocks_used": 4096}
    instance = {"instance_id": "demo-large-0", "model": "demo-large", "state": "ready", "load": load}
    instances = _drawn(instances_table([{**instance, "cached_blocks": 777}], is_narrow=is_narrow), width)
    assert max(map(len, instances.splitlines())) <= width
    assert all(word in instances for word in ("demo-large-0", "ready", "12", "4096", "777"))
    assert "…" not in instances


def test_the_ranks_of_an_instance_are_shown_where_one_has_several() -> None:
    one, none = ({"instance_id": name, "tensor_parallel": "1", "pipeline_parallel": "1"} for name in "ab")
    assert "ranks" not in _drawn(instances_table([one, none], is_narrow=True), 160)
    two = {"instance_id": "c", "tensor_parallel": "2", "pipeline_parallel": ""}
    four = {"instance_id": "d", "tensor_parallel": "2", "pipeline_parallel": "2"}
    eight = {"instance_id": "f", "tensor_parallel": "2", "pipeline_parallel": "2", "data_parallel": "2"}
    drawn = _drawn(instances_table([one, two, four, eight, {"instance_id": "e"}], is_narrow=True), 160)
    assert all(word in drawn for word in ("ranks", "2 (TP)", "4 (TP x PP)", "8 (TP x PP x DP)"))


def test_each_rank_of_an_instance_has_a_row_with_its_health() -> None:
    rank = {"core": 0, "rank": 0, "port": 7300, "obstacle": "", "pulling": 1, "serving": 2, "exported_blocks": 33}
    rank |= {"pulls_total": "44", "failed_pulls_total": "5", "pulled_bytes_total": "6000000"}
    ill = {**rank, "rank": 1, "port": 7302, "obstacle": "its KV transfer agent does not answer"}
    assert ranks_table([{"instance_id": "a"}, {"instance_id": "b", "ranks": []}]) is None
    spread = {"instance_id": "c", "tensor_parallel": "2", "ranks": [rank, ill]}
    cores = {"instance_id": "d", "data_parallel": "2", "ranks": [rank, {**rank, "core": 1, "port": 7304}]}
    lost = {"instance_id": "e", "tensor_parallel": "2", "ranks": [{"error": "it is away"}]}
    rows = _drawn(ranks_table([{"instance_id": "a"}, spread, cores, lost]), 160).splitlines()
    for found in (("c", "0", "7300", "yes", "33", "44", "6.0"), ("c", "1", "does not answer"), ("d", "1.0", "7304")):
        assert any(all(word in row for word in found) for row in rows), found
    assert any("e" in row and "it is away" in row for row in rows)


def test_an_instance_that_was_to_pull_prefixes_has_a_line() -> None:
    told = {"pulled_total": "3", "computed_total": "1", "tokens_total": "5888", "token_ms": 0.004}
    first = {"pulled_total": "0", "computed_total": "2", "tokens_total": "0", "token_ms": 0.0}
    instances = [
        {"instance_id": "a", "load": {"pulls": told}},
        {"instance_id": "b", "load": {"pulls": first}},
        {"instance_id": "c", "load": {}},
        {"instance_id": "d"},
    ]
    assert pull_lines(instances) == [
        "a pulled 3 prefixes (5,888 tokens, 4 us each) and computed 1 that it was to pull",
        "b pulled 0 prefixes (0 tokens) and computed 2 that it was to pull",
    ]


def test_hits_are_shown_by_tier_as_far_as_there_are_tiers() -> None:
    load = {"engine_hit_tokens_total": 11, "host_hit_tokens_total": 22, "disk_hit_tokens_total": 33}
    instance = {"instance_id": "a", "load": load, "cached_blocks": 1}
    on_host, on_disk = {**instance, "host_blocks": 44}, {**instance, "host_blocks": 44, "disk_blocks": 55}
    shown = [_drawn(instances_table([each], is_narrow=False), 200) for each in (instance, on_host, on_disk)]
    assert [[number in table for number in ("11", "22", "33", "44", "55")] for table in shown] == [
        [True, False, False, False, False],
        [True, True, False, True, False],
        [True, True, True, True, True],
    ]
