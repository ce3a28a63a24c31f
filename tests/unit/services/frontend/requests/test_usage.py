"""Each request stands in the usage once, with the tokens that its client was told."""

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter

from mesh.errors import ConfigurationError
from mesh.runtime import SystemThreads
from services.cli.usage import command, each_request_once, read_records, summed_by
from services.frontend.requests import usage
from services.frontend.requests.api_keys import new_key_line
from services.frontend.requests.usage import ModelUsage, Price, UsageFile, UsageLog, UsageRecord, cost_of
from tests.unit.services.frontend.cascade_of_fakes import cascade, saying
from tests.unit.services.frontend.fakes import tokens
from tests.unit.services.frontend.mesh_of_fakes import mesh_of_fakes


def a_record(request_id: str = "r", prompt: int = 10, cached: int = 4, output: int = 5, **fields: Any) -> UsageRecord:
    given = {"unix_ms": 1000, "tenant": "alice", "model": "m", "endpoint": "/v1/completions", "status": 200, **fields}
    return UsageRecord(request_id=request_id, prompt_tokens=prompt, cached_tokens=cached, output_tokens=output, **given)


def a_log(file: UsageFile, **prices: Price) -> UsageLog:
    return UsageLog(file, prices, SystemThreads(), Counter("lost", "Lost", registry=CollectorRegistry()))


def read(folder: Path) -> list[UsageRecord]:
    unreadable: list[str] = []
    records = list(read_records([folder], unreadable))
    assert unreadable == []
    return records


REQUESTS = st.lists(st.tuples(st.integers(1, 50), st.lists(st.integers(0, 100), min_size=1, max_size=4)), max_size=12)


@given(REQUESTS, st.randoms(use_true_random=False))
def test_each_request_counts_once_wherever_its_stream_broke(requests: list[tuple[int, list[int]]], random: Any) -> None:
    """Lines of every break and of the end, of several frontends, some of them twice, in any order."""
    lines = [
        a_record(f"r{number}", prompt, 0, output)
        for number, (prompt, breaks) in enumerate(requests)
        for output in (*breaks, breaks[0])
    ]
    random.shuffle(lines)
    sums = summed_by("tenant", each_request_once(lines).values())
    if requests:
        total = sums["alice"]
        assert total.requests == len(requests)
        assert total.prompt_tokens == sum(prompt for prompt, _ in requests)
        assert total.output_tokens == sum(max(breaks) for _, breaks in requests)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=40), st.integers(0, 3))
def test_files_are_bounded_and_no_line_is_cut(tmp_path_factory: Any, sizes: list[int], kept: int) -> None:
    folder = tmp_path_factory.mktemp("usage")
    file = UsageFile(folder / "f.jsonl", 100, kept)
    lines = [f"{number}:{'x' * size}".encode() for number, size in enumerate(sizes)]
    for line in lines:
        file.append([line])
    file.close()
    paths = [folder / "f.jsonl", *(folder / f"f.jsonl.{number}" for number in range(1, kept + 1))]
    assert set(folder.iterdir()) <= set(paths)
    assert all(path.stat().st_size <= 100 for path in folder.iterdir())
    found = [line for path in reversed(paths) if path.exists() for line in path.read_bytes().splitlines()]
    assert found == lines[len(lines) - len(found) :], "the newest, in order"


def test_a_line_that_a_killed_process_left_unfinished_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(msgspec.json.encode(a_record("whole")) + b'\n{"request_id":"ha')
    file = UsageFile(path, 10_000, 1)
    file.append([msgspec.json.encode(a_record("next"))])
    file.close()
    unreadable: list[str] = []
    assert [each.request_id for each in read_records([path], unreadable)] == ["whole", "next"]
    assert len(unreadable) == 1


@pytest.mark.live
async def test_a_full_disk_delays_records_and_doubles_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "RETRY_S", 0.0)
    file, fails = UsageFile(tmp_path / "f.jsonl", 10_000, 1), itertools.chain([True, True], itertools.repeat(False))
    append = file.append

    def full(lines: list[bytes]) -> None:
        if next(fails):
            append(lines[:1])
            raise OSError(28, "No space left on device")
        append(lines)

    monkeypatch.setattr(file, "append", full)
    log = a_log(file)
    writing = asyncio.create_task(log.write())
    for number in range(5):
        log.add(a_record(f"r{number}"))
    async with asyncio.timeout(30):
        while len(each_request_once(read(tmp_path))) < 5:  # noqa: ASYNC110 (a file has no event)
            await asyncio.sleep(0.001)
    writing.cancel()
    await log.stop()
    assert summed_by("tenant", each_request_once(read(tmp_path)).values())["alice"].requests == 5


def test_costs_are_by_the_name_that_was_asked_for_or_by_the_tiers() -> None:
    prices = dict([Price.parse("m=1,0.1,2"), Price.parse("a/b=3,3,3")])
    assert cost_of(a_record(), prices) == pytest.approx((6 * 1 + 4 * 0.1 + 5 * 2) / 1e6)
    tiers = (ModelUsage("m", 10, 4, 5), ModelUsage("a/b", 10, 0, 5))
    both = a_record(prompt=20, output=10, model="both", tiers=tiers)
    assert cost_of(both, prices) == pytest.approx((16.4 + 45) / 1e6)
    assert cost_of(both, {"m": prices["m"]}) is None, "a tier's price is not known"
    assert cost_of(both, {"both": Price(1, 1, 1)}) == pytest.approx(30 / 1e6)


@pytest.mark.parametrize("text", ["m", "m=1", "m=1,2", "=1,2,3", "m=1,2,x", "m=1,2,-3", "m=1,2,inf", "m=1,nan,3"])
def test_a_price_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="write MODEL=PROMPT,CACHED,OUTPUT"):
        Price.parse(text)


@pytest.mark.live
async def test_records_say_what_clients_were_told(model_path: Path, tmp_path: Path) -> None:
    key, line = new_key_line("alice", bytes(32))
    keys, folder = tmp_path / "keys", tmp_path / "usage"
    keys.write_text(f"{line}\n")
    told = {}
    options: dict[str, Any] = {"api_keys_file": keys, "usage_folder": folder, "price": ("tiny=1,1,1",)}
    async with mesh_of_fakes(model_path, **options) as mesh:
        await mesh.add_worker(saying(mesh, "one two three"), model="tiny")
        async with mesh.client(key) as client:
            for stream in (False, True):
                asked: Any = {"model": "tiny", "prompt": ["Once", "Twice"], "n": 2, "stream": stream}
                if stream:
                    chunks = [each async for each in await client.completions.create(
                        **asked, stream_options={"include_usage": True})]  # fmt: skip
                    told[chunks[-1].id] = chunks[-1].usage
                else:
                    answer = await client.completions.create(**asked)
                    told[answer.id] = answer.usage
        async with mesh.http() as http:
            refused = await http.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
            assert refused.status_code == 401
    records = each_request_once(read(folder))
    assert records.keys() == told.keys(), "who has no key is nobody's account"
    for request_id, record in records.items():
        answer = told[request_id]
        assert (record.prompt_tokens, record.output_tokens) == (answer.prompt_tokens, answer.completion_tokens)
        assert record.cached_tokens == answer.prompt_tokens_details.cached_tokens
        assert (record.tenant, record.model, record.status) == ("alice", "tiny", 200)
        assert record.cost == pytest.approx(answer.total_tokens / 1e6)


@pytest.mark.live
async def test_a_stream_whose_client_leaves_counts_what_it_got(model_path: Path, tmp_path: Path) -> None:
    async with mesh_of_fakes(model_path, usage_folder=tmp_path) as mesh:
        script = tokens(*([token] for token in mesh.ids("one two three four five six seven eight nine ten")))
        await mesh.add_worker(lambda _: script, step_s=0.2, model="tiny")
        async with mesh.client() as client:
            answer = await client.completions.create(model="tiny", prompt="Once", stream=True, max_tokens=100)
            await anext(aiter(answer))
            await answer.close()
        await mesh.until(lambda: mesh.service.requests_total == 1)
    (record,) = read(tmp_path)
    assert record.status == 499
    assert record.prompt_tokens == len(mesh.ids("<s>Once"))
    assert 1 <= record.output_tokens < len(script)


@pytest.mark.live
async def test_all_tiers_of_a_cascade_are_counted(model_path: Path, tmp_path: Path) -> None:
    prices = ("small=1,1,1", "large=10,10,10")
    async with cascade(model_path, lambda _: 69.9, usage_folder=tmp_path, price=prices) as both:
        answer = (await both.ask()).parse()
    (record,) = read(tmp_path)
    assert (record.prompt_tokens, record.output_tokens) == (answer.usage.prompt_tokens, answer.usage.completion_tokens)
    assert (record.model, record.tier) == ("both", "large")
    small, large = record.tiers
    assert small.output_tokens + large.output_tokens == record.output_tokens
    of_small, of_large = (each.prompt_tokens + each.output_tokens for each in (small, large))
    assert record.cost == pytest.approx((of_small + 10 * of_large) / 1e6)


def test_the_command_sums_up(tmp_path: Path) -> None:
    (tmp_path / "frontend-0.jsonl").write_bytes(
        b"\n".join(map(msgspec.json.encode, [a_record("a", output=2), a_record("b", tenant="bob", cost=0.5)]))
    )
    (tmp_path / "frontend-1.jsonl.1").write_bytes(msgspec.json.encode(a_record("a", output=7, unix_ms=5000)))
    found = json.loads(CliRunner().invoke(command, [str(tmp_path), "--json"]).output)
    assert found["by"] == "tenant"
    assert found["sums"]["alice"] == {
        "requests": 1, "prompt_tokens": 10, "cached_tokens": 4, "output_tokens": 7, "cost": 0.0, "without_price": 1
    }  # fmt: skip
    assert found["sums"]["bob"]["cost"] == 0.5
    since = CliRunner().invoke(command, [str(tmp_path), "--json", "--since", "1970-01-01T00:00:03"])
    assert set(json.loads(since.output)["sums"]) == {"alice"}
    shown = CliRunner().invoke(command, [str(tmp_path), "--by", "model"]).output
    assert "12" in shown, "7 and 5 tokens of output"
    wrong = CliRunner().invoke(command, [str(tmp_path), "--since", "yesterday"])
    assert wrong.exit_code == 2
