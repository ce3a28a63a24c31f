"""Requests of an attached server that was started with our connector: what is heard of them when they are paused."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from controlplane.model.request import EngineRequest, FinishReason
from engine_worker.engines.attached.engine import AttachedEngine
from engine_worker.engines.attached.settings import AttachedSettings
from engine_worker.engines.movable import PausedRequest
from engine_worker.engines.vllm.connector.messages import Export, Release
from engine_worker.engines.vllm.hidden_states.message import CapturedStates
from mesh.errors import ConfigurationError, EngineFailed, RequestRefused
from mesh.runtime import SystemClock
from tests.unit.engine_worker.attached.fake_connector import SECRET, FakeConnector
from tests.unit.engine_worker.attached.fake_server import MODEL_PATH, FakeServer
from tests.unit.engine_worker.attached.test_attached_engine import GREEDY, PROMPT, Reader, answer_of, attached, soon

pytestmark = pytest.mark.live


@pytest_asyncio.fixture
async def parts(tmp_path: Path) -> AsyncIterator[tuple[FakeServer, FakeConnector, Reader]]:
    async with FakeServer() as server:
        connector = FakeConnector(f"ipc://{tmp_path}/control", server.limits.block_tokens)
        async with attached(server, control=connector.endpoint, answer_s=10.0) as reader:
            yield server, connector, reader
        await connector.close()


async def paused_after_a_token(reader: Reader) -> PausedRequest | None:
    await reader.until(lambda: "r" in reader.deltas)
    return await reader.engine.pause("r")


async def test_a_pause_is_what_was_heard_before_the_stream_was_closed(
    parts: tuple[FakeServer, FakeConnector, Reader],
) -> None:
    server, connector, reader = parts
    whole = await answer_of(reader, "whole")
    engine, told = reader.engine, []
    server.stops_after = 5
    engine.submit(EngineRequest("r", PROMPT, GREEDY))
    engine.export("r", "m", "token", told.append)
    pausing = asyncio.create_task(paused_after_a_token(reader))
    await soon(lambda: bool(server.aborted))
    server.stops_after = 0  # it may have been closed before it stood still
    # By now it has computed more than was ever sent.
    await connector.pause("r", whole[:20], len(PROMPT) + 19)
    paused = await pausing
    assert paused is not None
    heard = paused.emitted_token_ids
    assert heard == whole[: len(heard)]
    assert 1 <= len(heard) <= 5
    await reader.until(lambda: len(reader.tokens("r")) == len(heard))
    assert paused.computed_tokens == len(PROMPT) + len(heard) - 1
    assert len(paused.block_ids) == -(-paused.computed_tokens // connector.block_tokens)
    assert Export("r", "m", "token") in connector.heard
    assert server.bodies[-1]["kv_transfer_params"] == {"penstock": {"request_id": "r", "secret": SECRET}}
    engine.resume("r")
    assert (await reader.end_of("r")).finish_reason is FinishReason.LENGTH
    assert reader.tokens("r") == whole
    await soon(lambda: Release("r-x") in connector.heard)
    assert engine.kv_address == "10.0.0.5:7300"
    assert engine._limits is not None
    assert engine._limits.label == "vllm", "as those engines are called with which it exchanges KV"


async def test_one_that_moved_leaves_no_word_behind(parts: tuple[FakeServer, FakeConnector, Reader]) -> None:
    server, connector, reader = parts
    server.stops_after = 2
    reader.engine.submit(EngineRequest("r", PROMPT, GREEDY))
    pausing = asyncio.create_task(paused_after_a_token(reader))
    await soon(lambda: bool(server.aborted))
    server.stops_after = 0  # it may have been closed before it stood still
    await connector.pause("r", reader.tokens("r"), len(PROMPT))
    assert await pausing is not None
    reader.engine.release("r", "m")
    await soon(lambda: Release("r-x") in connector.heard)
    assert reader.last("r").finish_reason is None
    assert reader.engine.load().running_requests == 0


async def test_one_that_ended_meanwhile_goes_on_behind_its_last_token(
    parts: tuple[FakeServer, FakeConnector, Reader],
) -> None:
    server, connector, reader = parts
    whole = await answer_of(reader, "whole")
    server.stops_after = 5
    reader.engine.submit(EngineRequest("r", PROMPT, GREEDY))
    pausing = asyncio.create_task(paused_after_a_token(reader))
    await soon(lambda: bool(server.aborted))
    server.stops_after = 0  # it may have been closed before it stood still
    await connector.end_instead("r")
    assert await pausing is None
    assert (await reader.end_of("r")).finish_reason is FinishReason.LENGTH
    assert reader.tokens("r") == whole


async def test_aborted_while_it_stands_still_it_ends_when_it_is_resumed(
    parts: tuple[FakeServer, FakeConnector, Reader],
) -> None:
    server, connector, reader = parts
    server.stops_after = 2
    reader.engine.submit(EngineRequest("r", PROMPT, GREEDY))
    pausing = asyncio.create_task(paused_after_a_token(reader))
    await soon(lambda: bool(server.aborted))
    server.stops_after = 0  # it may have been closed before it stood still
    await connector.pause("r", reader.tokens("r"), len(PROMPT))
    await pausing
    reader.engine.abort("r")
    assert reader.last("r").finish_reason is None
    reader.engine.resume("r")
    assert (await reader.end_of("r")).finish_reason is FinishReason.ABORT


async def test_states_of_other_clients_have_no_name(parts: tuple[FakeServer, FakeConnector, Reader]) -> None:
    server, connector, reader = parts
    server.stops_after = 2
    reader.engine.submit(EngineRequest("r", PROMPT, GREEDY))
    await reader.until(lambda: "r" in reader.deltas)
    ids = [f"cmpl-{server.bodies[-1]['request_id']}-0-01234567", "cmpl-theirs-0-01234567"]
    await connector.tell(msgspec.msgpack.encode(CapturedStates(4, ids, [44, 9], 2, bytes(16))))
    async with asyncio.timeout(20):
        states = await anext(reader.engine.hidden_states())
    assert (states.step, states.request_ids, states.context_tokens) == (4, ("r", ""), (44, 9))


async def test_without_the_connector_nothing_moves_and_with_another_servers_nothing_starts(tmp_path: Path) -> None:
    async with FakeServer() as server:
        async with attached(server) as reader:
            engine = reader.engine
            with pytest.raises(ConfigurationError):
                engine.kv_agent()
            with pytest.raises(RequestRefused, match="cannot move"):
                await engine.reserve("m", EngineRequest("r", PROMPT, GREEDY))
            assert "connector" in await engine.capture_hidden_states(20)
            assert engine.kv_address == ""
        connector = FakeConnector(f"ipc://{tmp_path}/control", server.limits.block_tokens + 1)
        about = AttachedSettings(server.url, model_path=MODEL_PATH, control=connector.endpoint)
        other = AttachedEngine(about, SystemClock())
        with pytest.raises(EngineFailed, match="another server's"):
            await other.start()
        await other.stop()
        await connector.close()
