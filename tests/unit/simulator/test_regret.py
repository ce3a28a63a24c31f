"""The regret suite: its figures by hand, and small runs of it."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mesh.errors import ConfigurationError
from services.cli.compare import command as compare
from simulator.cluster.config import ClusterConfig
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig
from simulator.regret import suite
from simulator.regret.plot import draw_regrets
from simulator.regret.rows import RunFigures, Sustained, report_of, rows_of
from simulator.regret.suite import RegretSuite
from simulator.report.report import Slo
from simulator.reproductions.measurement import System, Workload, own_req_s
from simulator.traces.source import TraceRecipe


def run(e2e_ms: float) -> RunFigures:
    return RunFigures(1.0, 2.0, 3.0, 4.0, e2e_ms, 5.0)


def test_regret_is_what_a_policy_is_above_the_best_one() -> None:
    rows = rows_of("t", 0.5, {"a": [run(100), run(120)], "b": [run(150), run(180)]})
    assert [(row.policy, row.e2e_ms, row.regret) for row in rows] == [("a", 110, 0), ("b", 165, pytest.approx(0.5))]
    assert rows[0].regret_interval == 0
    # Differences 50 and 60: their mean is known to 12.71 x 7.07 / sqrt(2).
    assert rows[1].regret_interval == pytest.approx(12.71 * 5 / 110)
    other = rows_of("u", 0.5, {"a": [run(300)], "b": [run(200)]})
    report = report_of([*rows, *other], {"t": {"own": 1.0}}, {"t": {"own": 2.0}}, seeds=2, instances=4, quick=True)
    assert list(report.max_regret) == ["a", "b"]
    assert report.max_regret == {"a": pytest.approx(0.5), "b": pytest.approx(0.5)}
    assert report.mean_regret == {"a": pytest.approx(0.25), "b": pytest.approx(0.25)}


def small(data: Path, policies: tuple[str, ...] = ("lmetric_plus", "least_loaded")) -> RegretSuite:
    cluster = ClusterConfig(2, InstanceConfig(kv_blocks=4096, max_queued_requests=10_000))
    return RegretSuite(data, cluster, LinearCost(), policies, seeds=1, quick=True, processes=1)


@pytest.mark.slow
def test_the_suite_has_a_row_for_each_trace_load_and_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversations = next(trace for trace in suite.TRACES if trace.name == "conversations")
    short = replace(conversations, quick_clip_s=60.0, quick_requests=100)
    monkeypatch.setattr(suite, "TRACES", (short, replace(short, name="chat", file="chat.csv")))
    with pytest.raises(ConfigurationError, match="none of the traces"):
        small(tmp_path).traces()
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "chat.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 18:00:{second:02}.0000000,500,20\n" for second in range(60))
    )
    report = small(tmp_path).run()
    assert [(row.trace, row.kv, row.load) for row in report.rows[::2]] == [
        (trace, kv, load) for trace in ("conversations", "chat") for kv in suite.KV for load in suite.LOADS
    ]
    assert all(min(row.regret for row in report.rows[first : first + 2]) == 0 for first in range(0, 32, 2))
    for trace, rates in report.sustained_req_s.items():
        bounds = report.bound_req_s[trace]
        assert 0 < bounds["own"] <= bounds["brought"] <= bounds["infinite"]
        assert rates["own"] > 0
        assert rates["lmetric"] > 0
    draw_regrets(tmp_path / "regrets.png", report)
    assert (tmp_path / "regrets.png").read_bytes().startswith(b"\x89PNG")


def test_what_a_journal_has_is_not_run_again(tmp_path: Path) -> None:
    journalled = replace(small(tmp_path), journal=tmp_path / "journal.jsonl")
    jobs = {name: partial(Sustained, 1.0, req_s) for name, req_s in (("a", 2.0), ("b", 3.0))}
    assert journalled._run(jobs) == {"a": Sustained(1.0, 2.0), "b": Sustained(1.0, 3.0)}
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(b'{"suite":"x","job":"c","resu')
    more = dict.fromkeys("ab", partial(Sustained, 9.0, 9.0)) | {"c": partial(Sustained, 4.0, 5.0)}
    assert journalled._run(more) == {
        "a": Sustained(1.0, 2.0),
        "b": Sustained(1.0, 3.0),
        "c": Sustained(4.0, 5.0),
    }
    longer = replace(journalled, quick=False)
    assert longer._run(dict.fromkeys("ab", partial(Sustained, 9.0, 9.0)))["a"] == Sustained(9.0, 9.0)


def test_the_best_of_all_that_were_searched_says_what_is_sustained(tmp_path: Path) -> None:
    """`lmetric` sustains more than the finder here, and then loads are shares of that."""
    small_suite = replace(small(tmp_path), only=("conversations",), kv=("own",))
    found = {"penstock": Sustained(2.0, 20.0), "lmetric": Sustained(3.0, 30.0)}
    known: dict[str, object] = {
        f"conversations, KV own: what {policy} sustain": rate for policy, rate in found.items()
    } | {"conversations: what no schedule exceeds": {"own": 40.0, "infinite": 50.0}}
    scales: list[float] = []

    class Told(RegretSuite):
        def _run(self, jobs: Mapping[str, Any]) -> dict[str, Any]:
            if next(iter(jobs.values())).func is suite.run_once:
                scales.extend(job.args[3] for job in jobs.values())
                return dict.fromkeys(jobs, run(100))
            return {name: known[name] for name in jobs}

    fields = {name: getattr(small_suite, name) for name in RegretSuite.__dataclass_fields__}
    report = Told(**fields).run()
    assert report.sustained_req_s == {"conversations": {"own": 30.0, "lmetric": 30.0}}
    assert sorted(set(scales)) == [pytest.approx(3.0 * load) for load in suite.LOADS]


def test_a_trace_that_the_suite_does_not_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no trace chats; it has chat, agents"):
        replace(small(tmp_path), only=("chats",)).traces()


SHORT = Workload(TraceRecipe("synthetic", clip_end_s=60.0), Slo(ttft_ms=2000, tpot_ms=100), 60)


def test_ones_own_trace_takes_the_place_of_the_suites(tmp_path: Path) -> None:
    of_two = small(tmp_path)
    mine = suite.own_trace("mine", SHORT, of_two.cluster, of_two.cost)
    own = replace(of_two, own=mine, kv=("own",))
    report = own.run()
    assert {row.trace for row in report.rows} == {"mine"}
    assert [row.load for row in report.rows[::2]] == list(suite.LOADS)
    start_req_s = mine.start_scale * 2 / suite.INSTANCES * own_req_s(SHORT, System(of_two.cluster, of_two.cost, ""))
    assert start_req_s == pytest.approx(report.bound_req_s["mine"]["infinite"] / 2)
    other = suite.own_trace("mine", replace(SHORT, max_requests=50), of_two.cluster, of_two.cost)
    assert len({each.fingerprint() for each in (of_two, own, replace(own, own=other))}) == 3


def test_ones_own_trace_gives_the_instances_its_blocks(tmp_path: Path) -> None:
    cluster, cost = ClusterConfig(2, InstanceConfig(kv_blocks=8192)), LinearCost()
    path = tmp_path / "trace.jsonl"
    line = '{{"timestamp": {at}, "input_length": 1500, "output_length": 20, "hash_ids": [{first}, 1, 2]}}\n'
    path.write_text("".join(line.format(at=3000 * number, first=number + 3) for number in range(3)))
    mine = suite.own_trace("mine", Workload(TraceRecipe(str(path)), Slo()), cluster, cost)
    instance = suite.with_blocks_of(mine, cluster).instance
    assert (instance.block_tokens, instance.kv_blocks) == (512, 8192 * 16 // 512)
    uneven = replace(cluster, instance=replace(cluster.instance, block_tokens=24, block_bytes=24))
    assert suite.with_blocks_of(mine, uneven) == uneven
    one = tmp_path / "one.jsonl"
    one.write_text(line.format(at=0, first=3))
    with pytest.raises(ConfigurationError, match="at least two"):
        suite.own_trace("one", Workload(TraceRecipe(str(one)), Slo()), cluster, cost)


def test_options_that_a_suite_has_no_use_for_are_refused(tmp_path: Path) -> None:
    for words, said in (
        (["--suite", "regret"], "--data"),
        (["--suite", "regret", "--data", str(tmp_path), "--trace", "synthetic"], "not of both"),
        (["--suite", "regret", "--only", "chat", "--trace", "synthetic"], "not of both"),
        (["--suite", "regret", "--data", str(tmp_path), "--copies", "2"], "leave out copies"),
        (["--suite", "regret", "--trace", "synthetic", "--rate-scale", "2"], "leave out rate_scale"),
        (["--suite", "regret", "--trace", "synthetic", "--slo-ttft-ms", "2"], "--slo-tpot-ms"),
        (["--quick", "--trace", "synthetic"], "of --suite"),
    ):
        result = CliRunner().invoke(compare, words)
        assert result.exit_code == 2
        assert said in result.output


@pytest.mark.process
def test_a_plain_compare_has_a_trace_where_placement_matters() -> None:
    words = ["--policy", "penstock", "--policy", "least_loaded", "--instances", "2", "--clip", "0:60", "--json", "-"]
    result = CliRunner().invoke(compare, [*words, "--processes", "1"])
    assert result.exit_code == 0, result.output
    reports = json.loads(result.stdout)["reports"]
    assert reports["penstock"]["e2e_ms"]["mean"] < 0.9 * reports["least_loaded"]["e2e_ms"]["mean"]
