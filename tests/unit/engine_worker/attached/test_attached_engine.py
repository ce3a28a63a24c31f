"""What becomes of requests when an attached server breaks off, refuses, hangs, goes or comes back as another one."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controlplane.model.request import EngineRequest, FinishReason, SamplingParams, TokenDelta
from engine_worker.engine_choice import identified
from engine_worker.engines.attached.client import ServerClient, ServerLost
from engine_worker.engines.attached.data_parallel import DataParallelAttached, attached_engine
from engine_worker.engines.attached.engine import AttachedEngine
from engine_worker.engines.attached.probe import MetricsReader
from engine_worker.engines.attached.settings import AttachedSettings
from engine_worker.engines.attached.text import TextTokenizer
from engine_worker.settings import WorkerSettings
from mesh.errors import ConfigurationError, EngineFailed, RequestRefused
from mesh.runtime import SystemClock
from tests.unit.engine_worker.attached.fake_server import MODEL_PATH, OPTIONS, FakeServer

pytestmark = pytest.mark.live

GREEDY = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
PROMPT = tuple(range(20, 60))
WAIT_S = 20.0


class Reader:
    """Everything that the engine tells, by request."""

    def __init__(self, engine: AttachedEngine | DataParallelAttached) -> None:
        self.engine = engine
        self.deltas: dict[str, list[TokenDelta]] = {}
        self._changed = asyncio.Event()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for output in self.engine.outputs():
            for delta in output.deltas:
                self.deltas.setdefault(delta.request_id, []).append(delta)
            self._changed.set()

    async def end_of(self, request_id: str) -> TokenDelta:
        await self.until(lambda: self.last(request_id).finish_reason is not None)
        return self.last(request_id)

    async def until(self, holds: Any) -> None:
        async with asyncio.timeout(WAIT_S):
            while not holds():
                self._changed.clear()
                await self._changed.wait()

    def last(self, request_id: str) -> TokenDelta:
        return self.deltas.get(request_id, [TokenDelta(request_id, 0, ())])[-1]

    def tokens(self, request_id: str) -> tuple[int, ...]:
        found: list[int] = []
        for delta in self.deltas[request_id]:
            assert delta.offset == len(found), "nothing is lost or told twice"
            found += delta.token_ids
        return tuple(found)


@asynccontextmanager
async def attached(server: FakeServer, **settings: Any) -> AsyncIterator[Reader]:
    about = AttachedSettings(server.url, **{"model_path": MODEL_PATH, "poll_s": 0.02, "answer_s": 0.3, **settings})
    engine = attached_engine(about, SystemClock())
    await engine.start()
    reader = Reader(engine)
    try:
        yield reader
    finally:
        await engine.stop()
        await asyncio.wait((reader.task,))


async def soon(holds: Callable[[], bool]) -> None:
    """What the server hears, or says when it is asked next."""
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def answer_of(
    reader: Reader, name: str, sampling: SamplingParams = GREEDY, prompt: tuple[int, ...] = PROMPT
) -> tuple[int, ...]:
    reader.engine.submit(EngineRequest(name, prompt, sampling))
    last = await reader.end_of(name)
    assert last.finish_reason is FinishReason.LENGTH, last
    return reader.tokens(name)


async def test_a_stream_that_breaks_off_goes_on_behind_its_last_token() -> None:
    async with FakeServer() as server, attached(server) as reader:
        whole = await answer_of(reader, "whole")
        server.breaks_after = 7
        assert await answer_of(reader, "broken") == whole
        first, second = server.bodies[-2:]
        assert second["prompt"][: len(first["prompt"])] == first["prompt"]
        assert len(second["prompt"]) >= len(first["prompt"]) + 6
        assert second["max_tokens"] + len(second["prompt"]) == first["max_tokens"] + len(first["prompt"])
        assert reader.engine.load().running_requests == 0


async def test_an_abort_closes_the_connection() -> None:
    slow = (*OPTIONS, "time_scale=20")
    async with FakeServer(options=slow) as server, attached(server) as reader:
        reader.engine.submit(EngineRequest("r", PROMPT, replace(GREEDY, max_tokens=900)))
        await reader.until(lambda: reader.last("r").token_ids)
        reader.engine.abort("r")
        assert (await reader.end_of("r")).finish_reason is FinishReason.ABORT
        await soon(lambda: bool(server.aborted))


async def test_a_server_that_is_killed_fails_the_engine_at_once() -> None:
    async with FakeServer(options=(*OPTIONS, "time_scale=20")) as server, attached(server, poll_s=60.0) as reader:
        reader.engine.submit(EngineRequest("r", PROMPT, replace(GREEDY, max_tokens=900)))
        await reader.until(lambda: reader.last("r").token_ids)
        await server.kill()
        with pytest.raises(EngineFailed, match="does not answer"):
            await asyncio.wait_for(asyncio.shield(reader.task), WAIT_S)
        assert reader.last("r").finish_reason is None, "the mesh goes on with it elsewhere"


async def test_one_that_goes_or_hangs_while_it_is_idle_is_noticed_too() -> None:
    async with FakeServer() as server, attached(server) as reader:
        server.awake.clear()
        with pytest.raises(EngineFailed, match="does not answer"):
            await asyncio.wait_for(asyncio.shield(reader.task), WAIT_S)
        server.awake.set()


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"started_s": 2000.0}, "started anew"), ({"name": "other"}, "not the model"), ({"root": "/b"}, "not the model")],
)
async def test_another_life_or_model_of_the_server_fails_the_engine(change: dict[str, Any], reason: str) -> None:
    async with FakeServer() as server, attached(server) as reader:
        for name, value in change.items():
            setattr(server, name, value)
        with pytest.raises(EngineFailed, match=reason):
            await asyncio.wait_for(asyncio.shield(reader.task), WAIT_S)


async def test_what_the_server_says_is_wrong_with_a_request_is_told() -> None:
    async with FakeServer() as server, attached(server, max_model_len=4096) as reader:
        reader.engine.submit(EngineRequest("r", tuple(range(20, 60)) * 30, GREEDY))
        last = await reader.end_of("r")
        assert last.finish_reason is FinishReason.ERROR
        assert "1200 tokens" in last.error
        assert len(await answer_of(reader, "next")) == 30


async def test_what_cannot_be_said_to_a_server_is_refused() -> None:
    async with FakeServer() as server, attached(server) as reader:
        for wrong, why in (
            ({"bad_words": ((7,),)}, "bad_words"),
            ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ):
            with pytest.raises(RequestRefused, match=why):
                reader.engine.submit(EngineRequest("r", PROMPT, replace(GREEDY, **wrong)))
        grammar = replace(GREEDY, structured_outputs='{"regex": "a+"}')
        with pytest.raises(RequestRefused, match="cannot go on"):
            reader.engine.submit(EngineRequest("r", PROMPT, grammar, emitted_token_ids=(7,)))


async def test_a_key_is_asked_for_by_name_and_sent() -> None:
    async with FakeServer(key="s3cret") as server:
        with pytest.raises(EngineFailed, match="PENSTOCK_ATTACH_API_KEY"):
            async with attached(server):
                pass
        async with attached(server, api_key="s3cret") as reader:
            assert len(await answer_of(reader, "r")) == 30


async def test_a_server_that_comes_late_is_waited_for_and_no_longer_than_asked() -> None:
    async with FakeServer() as gone:
        url, port = gone.url, gone.port
    settings = AttachedSettings(url, model_path=MODEL_PATH, start_s=0.0)
    with pytest.raises(EngineFailed, match="was not serving within 0 s"):
        await AttachedEngine(settings, SystemClock()).start()
    starting = asyncio.create_task(AttachedEngine(replace(settings, start_s=WAIT_S), SystemClock()).start())
    await asyncio.sleep(0.05)
    async with FakeServer(port=port):
        limits = await starting
        assert (limits.max_model_len_tokens, limits.label) == (1024, "attached-vllm")


async def test_name_and_source_of_the_model_come_from_the_server() -> None:
    async with FakeServer(name="/models/chat") as server:
        asked = WorkerSettings("", "", engine="attached", engine_arg=(f"url={server.url}",))
        found = await identified(asked, SystemClock())
        assert (found.model, found.model_path) == ("chat", MODEL_PATH)
        named = await identified(replace(asked, model="mine"), SystemClock())
        assert named.model == "mine"
    async with FakeServer(root="/srv/models/chat") as server:
        with pytest.raises(ConfigurationError, match=r"/srv/models/chat, which is not on this machine.*--tokenizer"):
            await identified(replace(asked, engine_arg=(f"url={server.url}",)), SystemClock())
    async with FakeServer(owner="llamacpp") as server:
        with pytest.raises(ConfigurationError, match="--tokenizer"):
            await identified(replace(asked, engine_arg=(f"url={server.url}",)), SystemClock())
    with pytest.raises(ConfigurationError, match="must be told both"):
        await identified(WorkerSettings("", "", engine="simulated"), SystemClock())


@pytest.mark.parametrize("takes_tokens", [True, False])
async def test_a_server_without_token_ids_is_talked_to_by_text_and_says_so(takes_tokens: bool) -> None:
    server = FakeServer(owner="llamacpp", takes_tokens=takes_tokens, tells_tokens=False)
    async with server, attached(server, max_model_len=1024) as reader:
        assert reader.engine._limits is not None
        assert reader.engine._limits.label == "attached-openai-by-text"
        sampling = SamplingParams(max_tokens=12, temperature=0.0)
        reader.engine.submit(EngineRequest("r", PROMPT, sampling))
        last = await reader.end_of("r")
        assert last.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        sent = server.bodies[-1]
        assert sent["prompt"] == (list(PROMPT) if takes_tokens else TextTokenizer(Path(MODEL_PATH)).decode(PROMPT))
        assert "return_token_ids" not in sent
        with pytest.raises(RequestRefused, match="top_k"):
            reader.engine.submit(EngineRequest("s", PROMPT, replace(sampling, top_k=5)))


async def test_requests_of_others_count_as_load() -> None:
    async with FakeServer(foreign=5) as server, attached(server) as reader:
        await soon(lambda: reader.engine.load().running_requests == 5)


async def test_structured_output_that_breaks_off_goes_on_where_somebody_knows_what_was_said() -> None:
    async with FakeServer() as server, attached(server) as reader:
        server.breaks_after = 3
        structured = replace(GREEDY, structured_outputs='{"choice": ["a rather long one", "another one of these"]}')
        reader.engine.submit(EngineRequest("r", PROMPT, structured))
        last = await reader.end_of("r")
        assert last.finish_reason is FinishReason.ERROR
        assert last.may_go_elsewhere
        assert "structured output cannot go on" in last.error


async def test_each_core_of_a_server_has_requests_by_its_load_and_its_cache(tmp_path: Path) -> None:
    async with (
        FakeServer(cores=2, foreign=3, publishes=f"ipc://{tmp_path}/events") as server,
        attached(server, kv_events=server.published_at, data_parallel_size=2) as reader,
    ):
        engine = reader.engine
        assert isinstance(engine, DataParallelAttached)
        first, second = engine.cores
        await soon(lambda: engine.load().running_requests == 3)
        assert (first.load().running_requests, second.load().running_requests) == (3, 0)
        cached: set[int] = set()
        reading = asyncio.create_task(read_blocks(engine, cached))
        whole = await answer_of(reader, "away from the others")
        named = EngineRequest("same", PROMPT, GREEDY)
        await soon(lambda: second.cached_tokens(named) > 0 and bool(cached))
        assert first.cached_tokens(named) == 0, "each core has a cache of its own"
        server.foreign = 0
        await soon(lambda: engine.load().running_requests == 0)
        assert await answer_of(reader, "same") == whole
        await soon(lambda: engine.load().running_requests == 0)  # loads are polled: "same" may count for a while yet
        assert await answer_of(reader, "other", prompt=PROMPT[::-1]) != whole
        assert server.asked_cores == ["0", "1", "1", "1", "0"], "a probe of each, then the three"
        server.breaks_after = 7
        assert await answer_of(reader, "broken") == whole
        assert server.asked_cores[-2:] == ["1", "1"], "where its cache is"
        reading.cancel()
        await server.kill()
        with pytest.raises(EngineFailed, match="does not answer"):
            await reader.task


async def read_blocks(engine: DataParallelAttached, into: set[int]) -> None:
    async for change in engine.kv_blocks():
        into |= set(change.stored)


@pytest.mark.parametrize("settings", [{"data_parallel_size": 3}, {"control": "ipc:///nowhere"}])
async def test_the_number_of_cores_is_the_servers(settings: dict[str, Any]) -> None:
    async with FakeServer(cores=2) as server:
        with pytest.raises(ConfigurationError, match="data_parallel_size=2"):
            async with attached(server, **settings):
                pass


async def test_all_cores_have_one_answer_of_the_metrics() -> None:
    async with FakeServer(cores=4) as server:
        client = ServerClient(server.url, "", 1.0)
        reader = MetricsReader(client, SystemClock(), fresh_s=60.0)
        first, *_ = await asyncio.gather(*(reader.read(core) for core in range(4)))
        assert first is not None
        assert server.metrics_told == 1
        await server.kill()
        lost = MetricsReader(client, SystemClock(), fresh_s=60.0)
        answers = await asyncio.gather(*(lost.read(core) for core in range(4)), return_exceptions=True)
        assert {type(answer) for answer in answers} == {ServerLost}
        await client.close()
