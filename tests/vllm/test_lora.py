"""LoRA adapters on two vLLM engines: what they say, what prefix caches share, and requests that go on elsewhere."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from controlplane.model.adapter import Adapter
from controlplane.model.prefix_hash import block_hashes, root_hash
from controlplane.model.request import EngineRequest, FinishReason
from engine_worker.adapters import adapter_digest
from engine_worker.engines.vllm.engine import VllmEngine
from mesh.errors import AdapterNotFound, AdapterUnavailable, EngineFailed
from penstock.testing.engine import GREEDY, EngineDriver
from tests.in_time import still
from tests.vllm.lora_adapter import make_adapter
from tests.vllm.moving import BLOCK_TOKENS, SETTINGS, Migration, Side, all_free, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

MODEL = Path(__file__).parents[2] / "demo" / "models" / "demo-small"
PROMPT = tuple(range(20, 120))
TOKENS = 400
LORA = ("enable_lora=true", "max_loras=2", "max_cpu_loras=2", "max_lora_rank=8")


@dataclass
class Adapters:
    """Three of them, and what plain vLLM says under two, and without."""

    poet: Adapter
    critic: Adapter
    third: Adapter
    expected: dict[str, tuple[int, ...]]
    """By the adapter's name; empty: without one."""


def at(name: str, path: str) -> Adapter:
    return Adapter(name, adapter_digest(path), path)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    folder = tmp_path_factory.mktemp("adapters")
    poet, critic, third = (
        at(name, make_adapter(folder / name, seed, model=MODEL))
        for seed, name in enumerate(("poet", "critic", "third"))
    )
    asked = [(PROMPT, path, TOKENS) for path in (None, poet.path, critic.path)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    plain = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.vllm.plain_vllm",
        str(MODEL),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment,
    )
    said, _ = await plain.communicate(json.dumps(asked).encode())
    answers = next(line for line in said.decode().splitlines() if line.startswith("ANSWERS "))
    known = [tuple(each) for each in json.loads(answers.removeprefix("ANSWERS "))]
    return Adapters(poet, critic, third, dict(zip(("", "poet", "critic"), known, strict=True)))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sides(adapters: Adapters) -> AsyncIterator[tuple[Side, Side]]:
    settings = replace(SETTINGS, model_path=str(MODEL), others=LORA, structured_outputs=False)
    started = replace(settings, lora_modules=f"poet={adapters.poet.path}")
    engines = VllmEngine(started), VllmEngine(settings)
    limits = [await engine.start() for engine in engines]  # in turn: each is to know which core process is its own
    assert [limit.max_loras for limit in limits] == [2, 2]
    source, target = (
        Side(engine, EngineDriver(engine, limit, 240.0)) for engine, limit in zip(engines, limits, strict=True)
    )
    yield source, target
    await target.driver.close()
    with suppress(EngineFailed):  # the last test kills it
        await source.driver.close()


_ids = iter(range(1_000_000))


def asked_of(adapter: Adapter | None, token_ids: tuple[int, ...] = PROMPT, tokens: int = TOKENS) -> EngineRequest:
    sampling = replace(GREEDY, max_tokens=tokens)
    return EngineRequest(f"lora-{next(_ids)}", token_ids, sampling, adapter=adapter)


async def answer(side: Side, request: EngineRequest) -> tuple[int, ...]:
    got = side.driver.submit_request(request)
    await side.driver.end_of(got)
    assert got.finish_reason is FinishReason.LENGTH, got.deltas[-1].error
    return got.token_ids


async def test_what_it_says_is_what_plain_vllm_says(sides: tuple[Side, Side], adapters: Adapters) -> None:
    (module,) = sides[0].engine.lora_modules
    assert await sides[0].engine.load_adapter(module) == adapters.poet
    for side in sides:
        answers = await asyncio.gather(
            *(answer(side, asked_of(each)) for each in (None, adapters.poet, adapters.critic))
        )
        assert dict(zip(("", "poet", "critic"), answers, strict=True)) == adapters.expected
    assert len(set(adapters.expected.values())) == 3


async def test_equal_prompts_share_blocks_under_the_same_adapter_and_salt_only(
    sides: tuple[Side, Side], adapters: Adapters
) -> None:
    side, token_ids = sides[0], prompt(4 * BLOCK_TOKENS)
    roots = set()
    for salt in ("", "pepper"):
        for adapter in (None, adapters.poet, adapters.critic):
            request = replace(asked_of(adapter, token_ids, 4), cache_salt=salt)
            first = side.driver.submit_request(request)
            await side.driver.end_of(first)
            assert first.cached_tokens == 0
            hashes = block_hashes(token_ids, BLOCK_TOKENS, root_hash(salt, request.adapter_digest))
            await side.driver.until(lambda hashes=hashes: set(hashes) <= side.driver.cached_hashes)
            again = side.driver.submit_request(replace(request, request_id=f"{request.request_id}-again"))
            await side.driver.end_of(again)
            assert again.cached_tokens == 3 * BLOCK_TOKENS
            roots.add(hashes[0])
    assert len(roots) == 6
    assert side.engine._block_map.unmapped_blocks_total == 0


async def test_moved_in_mid_decode_with_its_kv(sides: tuple[Side, Side], adapters: Adapters) -> None:
    source, target = sides
    free = [await side.free_blocks() for side in sides]
    for adapter in (adapters.poet, adapters.critic):
        await target.engine.unload_adapter(adapter.digest)
        assert target.engine.adapters.number(adapter.digest) is None
        request = asked_of(adapter)
        migration = Migration(source, target, request, source.driver.submit_request(request))
        await source.driver.until(lambda: len(migration.answer.token_ids) >= 20)  # noqa: B023
        await migration.offer()
        await migration.round()
        paused = await migration.pause()
        continued = await migration.hand_off(paused)
        await target.driver.end_of(continued)
        assert continued.cached_tokens == paused.computed_tokens
        assert migration.answer.token_ids + continued.token_ids == adapters.expected[adapter.name]
    assert source.engine.load().adapters.in_use == target.engine.load().adapters.in_use == ()
    await all_free(sides, free)


async def test_where_other_files_lie_it_does_not_go_on(
    sides: tuple[Side, Side], adapters: Adapters, tmp_path: Path
) -> None:
    """The same name and path on another machine, with weights of another training."""
    side = sides[1]
    strange = replace(adapters.poet, digest="of another training")
    with pytest.raises(AdapterUnavailable, match="'poet' has other files here"):
        await side.engine.reserve("migration", asked_of(strange))
    refused = side.engine.load().adapters.refused
    assert refused == ("of another training",)
    gone = Adapter("gone", "d" * 32, str(tmp_path / "gone"))
    got = side.driver.submit_request(asked_of(gone))
    await side.driver.end_of(got)
    last = got.deltas[-1]
    assert (last.finish_reason, last.may_go_elsewhere) == (FinishReason.ERROR, True)
    assert "it has no adapter_model.safetensors" in last.error
    assert await answer(side, asked_of(adapters.poet)) == adapters.expected["poet"], "nobody else is the worse for it"


async def test_loaded_and_unloaded_while_it_runs(sides: tuple[Side, Side], adapters: Adapters, tmp_path: Path) -> None:
    engine = sides[0].engine
    with pytest.raises(AdapterNotFound):
        await engine.load_adapter(Adapter("none", "", str(tmp_path)))
    with pytest.raises(AdapterUnavailable, match="rank"):
        await engine.load_adapter(Adapter("large", "", make_adapter(tmp_path / "large", 7, rank=16, model=MODEL)))
    path = make_adapter(tmp_path / "student", 8, model=MODEL)
    former = await engine.load_adapter(Adapter("student", "", path))
    before = await answer(sides[0], asked_of(former, tokens=40))
    make_adapter(tmp_path / "student", 9, model=MODEL)
    latter = await engine.load_adapter(Adapter("student", "", path))
    assert latter.digest != former.digest
    got = sides[0].driver.submit_request(asked_of(latter, tokens=40))
    await sides[0].driver.end_of(got)
    assert got.cached_tokens == 0, "KV of the former weights is none of it"
    assert got.token_ids != before
    await engine.unload_adapter(latter.digest)
    assert engine.adapters.number(latter.digest) is None


async def test_as_many_as_fit_and_no_more(sides: tuple[Side, Side], adapters: Adapters) -> None:
    side = sides[1]
    running = [side.driver.submit_request(asked_of(each, tokens=300)) for each in (adapters.poet, adapters.critic)]
    await side.driver.until(lambda: all(each.token_ids for each in running))
    still(all(not each.ended.is_set() for each in running), "both run")
    assert set(side.engine.load().adapters.in_use) == {adapters.poet.digest, adapters.critic.digest}
    with pytest.raises(AdapterUnavailable, match="as many as the instance has room for"):
        side.driver.submit_request(asked_of(adapters.third))
    for each in running:
        await side.driver.end_of(each)
    assert len(await answer(side, asked_of(adapters.third))) == TOKENS
    assert side.engine.load().adapters.idle[-1] == adapters.third.digest
    side.engine.adapters.validate()


async def test_aborted_while_its_adapter_is_loaded(sides: tuple[Side, Side], adapters: Adapters) -> None:
    side = sides[1]
    await side.engine.unload_adapter(adapters.poet.digest)
    request = asked_of(adapters.poet)
    got = side.driver.submit_request(request)
    await asyncio.sleep(0)
    side.engine.abort(request.request_id)
    await side.driver.end_of(got)
    assert got.finish_reason is FinishReason.ABORT
    assert side.engine.load().adapters.in_use == ()


async def test_after_a_kill_it_goes_on_elsewhere_token_for_token(sides: tuple[Side, Side], adapters: Adapters) -> None:
    """Last of all: the first engine is dead afterwards."""
    source, target = sides
    request = asked_of(adapters.critic)
    got = source.driver.submit_request(request)
    await source.driver.until(lambda: len(got.token_ids) >= 20)
    for core in source.engine._core._processes:  # type: ignore[union-attr]
        psutil.Process(core.pid).kill()
    emitted = got.token_ids
    still(20 <= len(emitted) < TOKENS, "it is under way when its engine is killed")
    rest = await answer(target, replace(request, request_id="recovered", emitted_token_ids=emitted))
    assert emitted + rest == adapters.expected["critic"]
