"""The worker's life from start to stop."""

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry, generate_latest

from controlplane.scheduler.wire import instance_description
from engine_worker.engine_choice import make_simulated
from engine_worker.engines.interface import EngineLimits
from engine_worker.kv.fabric import KvFabric
from engine_worker.kv.settings import KvTransferSettings
from engine_worker.role import WorkerRole
from engine_worker.settings import WorkerSettings
from mesh.errors import ConfigurationError, EngineFailed
from mesh.exit_status import ExitStatus
from mesh.membership import Directory, Member
from mesh.role import RoleContext
from mesh.rpc.client import open_channel
from mesh.rpc.server import RpcServer
from mesh.runtime import GrpcTransport, SystemClock, SystemEntropy, system_runtime
from mesh.store.embedded import EmbeddedStore
from mesh.store.host import StoreHost
from mesh.text_files import TextFiles, read_text_files, text_hash
from penstock.v1 import request_pb2, worker_pb2, worker_pb2_grpc
from services.frontend.workers.text_files import fetch_text_files
from tests.unit.engine_worker.worker.fake_engine import LIMITS, FakeEngine
from tests.unit.engine_worker.worker.running_worker import SETTINGS, WAIT_S, FrontendStream

pytestmark = pytest.mark.live


@pytest.fixture
async def context() -> AsyncIterator[RoleContext]:
    host = StoreHost(SystemClock(), SystemEntropy())
    store = EmbeddedStore(host)
    directory = Directory(store)
    await directory.start()
    server = RpcServer(GrpcTransport())
    yield RoleContext(
        "worker",
        "worker-0",
        "0badcafe",
        server.address,
        store,
        directory,
        server,
        CollectorRegistry(),
        system_runtime(),
    )
    await directory.stop()
    await server.stop(0.1)
    host.close()


def make_role(engine: FakeEngine, settings: WorkerSettings = SETTINGS) -> WorkerRole:
    return WorkerRole(settings, lambda _settings, _seed, _clock: engine)


async def start_with_request(role: WorkerRole, context: RoleContext, engine: FakeEngine, channel: Any) -> Any:
    """A stream whose request "a" runs in the engine of a started role."""
    await role.start(context)
    await context.server.start()
    await context.server.set_serving(True)
    stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
    stream = FrontendStream(stub.Stream())
    await stream.hello()
    await stream.generate("a")
    async with asyncio.timeout(WAIT_S):
        while not engine.requests:  # noqa: ASYNC110  the other end of a socket sets no event here
            await asyncio.sleep(0.001)
    return stream


async def test_a_worker_announces_what_frontends_need_to_know(context: RoleContext) -> None:
    role = make_role(FakeEngine())
    assert await role.start(context) == {
        "model": "m",
        "model_path": "/models/m",
        "text_hash": "",
        "sampling_defaults": "",
        "tool_call_parser": "",
        "tokenizer_mode": "",
        "reasoning_parser": "",
        "tasks": "generate",
        "pair_form": "",
        "media": "",
        "lora_modules": "",
        "max_loras": "0",
        "engine": "simulated",
        "block_tokens": "16",
        "max_model_len_tokens": "1024",
        "phase": "any",
        "tensor_parallel": "1",
        "pipeline_parallel": "1",
        "data_parallel": "1",
        "http_url": "",
    }
    await role.stop()


async def test_a_worker_reports_under_the_address_that_its_process_has_now(context: RoleContext) -> None:
    role = make_role(FakeEngine())
    await role.start(context)
    for told in context.on_new_address:
        told("10.0.0.2:1")
    assert role.instance is not None
    assert role.instance.description.address == "10.0.0.2:1"
    await role.stop()


async def test_a_worker_whose_requests_cannot_move_serves_and_says_why(context: RoleContext) -> None:
    def no_fabric(settings: KvTransferSettings) -> KvFabric:
        raise ConfigurationError("UCX is not installed")

    role = WorkerRole(SETTINGS, lambda settings, _seed, clock: make_simulated(settings, clock, no_fabric))
    await role.start(context)
    assert role.instance is not None
    async with asyncio.timeout(WAIT_S):
        while not role.instance.transfer_obstacle:  # noqa: ASYNC110  it looks for it in a task of its own
            await asyncio.sleep(0.001)
    assert role.instance.load().transfer_obstacle == "UCX is not installed"
    assert not role.instance.description.pulls_prefixes
    assert context.registry.get_sample_value("penstock_worker_transfer_obstacle") == 1
    await role.stop()


async def test_a_worker_hands_out_its_tokenizer(context: RoleContext, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    role = make_role(FakeEngine(), replace(SETTINGS, model_path=str(tmp_path)))
    announced = (await role.start(context))["text_hash"]
    await context.server.start()
    async with open_channel(GrpcTransport(), context.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        request = worker_pb2.GetTextFilesRequest(text_hash=announced)
        sent = [(piece.file, piece.content) async for piece in stub.GetTextFiles(request)]
        assert sent == [("tokenizer.json", b"{}")]
        (tmp_path / "tokenizer.json").write_text("{ }")
        with pytest.raises(grpc.aio.AioRpcError, match="changed since this worker was started"):
            _ = [piece async for piece in stub.GetTextFiles(request)]
    await role.stop()


class Reader(FakeEngine):
    """Knows what its checkpoint lacks."""

    def text_files(self, checkpoint: TextFiles) -> TextFiles:
        return {"tokenizer.json": b"made", "tokenizer_config.json": b"[%d]" % len(checkpoint)}


@pytest.mark.parametrize("mode", ["hf", "mistral"])
async def test_a_worker_hands_out_what_its_checkpoint_lacks(context: RoleContext, tmp_path: Path, mode: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tekken.json").write_text("own")
    role = make_role(Reader(replace(LIMITS, tokenizer_mode=mode)), replace(SETTINGS, model_path=str(tmp_path)))
    attributes = await role.start(context)
    assert attributes["tokenizer_mode"] == ("mistral" if mode == "mistral" else "")
    await context.server.start()
    member = Member("worker", "worker-0", "1", context.address, "", attributes)
    assert await fetch_text_files(member, GrpcTransport(), attributes["text_hash"]) == {
        "config.json": b"{}",
        "tokenizer.json": b"made",
        "tokenizer_config.json": b"[1]",
        **({"tekken.json": b"own"} if mode == "mistral" else {}),
    }
    await role.stop()


@pytest.mark.parametrize("template", ["chat_template.jinja", "tokenizer_config.json"])
async def test_a_checkpoint_that_has_it_all_is_handed_out_as_it_is(
    context: RoleContext, tmp_path: Path, template: str
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / template).write_text('{"chat_template": "hi"}')
    engine = Reader(replace(LIMITS, tokenizer_mode="mistral"))
    role = make_role(engine, replace(SETTINGS, model_path=str(tmp_path)))
    attributes = await role.start(context)
    assert attributes["tokenizer_mode"] == "", "frontends make the prompts"
    assert attributes["text_hash"] == text_hash(read_text_files(tmp_path))
    await role.stop()


@pytest.mark.parametrize("has_own", [True, False])
async def test_prompts_are_mistrals_where_its_file_is_there(
    context: RoleContext, tmp_path: Path, has_own: bool
) -> None:
    """Of an engine that is told the mode, as an attached one is, and makes nothing."""
    (tmp_path / "tokenizer.json").write_text("{}")
    if has_own:
        (tmp_path / "tekken.json").write_text("own")
    engine = FakeEngine(replace(LIMITS, tokenizer_mode="mistral"))
    role = make_role(engine, replace(SETTINGS, model_path=str(tmp_path)))
    attributes = await role.start(context)
    assert attributes["tokenizer_mode"] == ("mistral" if has_own else "")
    files = {"tokenizer.json": b"{}", **({"tekken.json": b"own"} if has_own else {})}
    assert attributes["text_hash"] == text_hash(files)
    await role.stop()


async def test_a_worker_says_how_many_gpus_its_engine_spans(context: RoleContext) -> None:
    role = make_role(FakeEngine(replace(LIMITS, tensor_parallel=4, pipeline_parallel=2)))
    await role.start(context)
    await context.server.start()
    async with open_channel(GrpcTransport(), context.server.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        described = await stub.Describe(worker_pb2.DescribeRequest(), timeout=WAIT_S)
    await role.stop()
    assert (described.instance.tensor_parallel, described.instance.pipeline_parallel) == (4, 2)
    known = instance_description(described.instance)
    assert (known.tensor_parallel, known.pipeline_parallel) == (4, 2)
    described.instance.ClearField("tensor_parallel")
    assert instance_description(described.instance).tensor_parallel == 1, "a worker that does not say"


async def test_an_engine_that_cannot_start_is_cleaned_up(context: RoleContext) -> None:
    class Broken(FakeEngine):
        async def start(self) -> EngineLimits:
            raise EngineFailed("no weights")

    engine = Broken()
    role = make_role(engine)
    with pytest.raises(EngineFailed, match="no weights"):
        await role.start(context)
    await role.stop()
    assert engine.stopped


async def test_the_role_fails_when_its_engine_dies(context: RoleContext) -> None:
    engine = FakeEngine()
    role = make_role(engine)
    async with open_channel(GrpcTransport(), context.address) as channel:
        stream = await start_with_request(role, context, engine, channel)
        failed = asyncio.create_task(role.failed())
        engine.die("core dumped")
        with pytest.raises(EngineFailed, match="core dumped"):
            await asyncio.wait_for(failed, WAIT_S)
        await asyncio.wait_for(role.stop(), WAIT_S)
        assert (await stream.only_delta()).error.code == request_pb2.ERROR_CODE_UNAVAILABLE
        assert await stream.read() is grpc.aio.EOF
    assert engine.stopped


async def test_waiting_for_failure_can_be_given_up_without_harm(context: RoleContext) -> None:
    engine = FakeEngine()
    role = make_role(engine)
    async with open_channel(GrpcTransport(), context.address) as channel:
        stream = await start_with_request(role, context, engine, channel)
        failed = asyncio.create_task(role.failed())
        await asyncio.sleep(0)
        failed.cancel()
        drain = asyncio.create_task(role.drain())
        await asyncio.sleep(0)
        engine.step(finish={"a"})
        assert (await stream.only_delta()).finish_reason == request_pb2.FINISH_REASON_STOP
        await asyncio.wait_for(drain, WAIT_S)
        await role.stop()


async def test_a_drain_that_is_cut_ends_the_rest_with_unavailable(context: RoleContext) -> None:
    engine = FakeEngine()
    role = make_role(engine)
    async with open_channel(GrpcTransport(), context.address) as channel:
        stream = await start_with_request(role, context, engine, channel)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(role.drain(), 0.01)
        await asyncio.wait_for(role.stop(), WAIT_S)
        assert (await stream.only_delta()).error.code == request_pb2.ERROR_CODE_UNAVAILABLE
    assert engine.stopped


async def test_health_follows_the_engine(context: RoleContext) -> None:
    engine = FakeEngine()
    role = make_role(engine, replace(SETTINGS, hang_s=0.01))
    async with open_channel(GrpcTransport(), context.address) as channel:
        await start_with_request(role, context, engine, channel)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="penstock.v1.Worker"))
        async with asyncio.timeout(WAIT_S):
            async for answer in watch:
                if answer.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                    break
            engine.step(finish={"a"})
            async for answer in watch:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    break
        watch.cancel()
        await role.stop()


async def test_metrics_show_engine_and_shell(context: RoleContext) -> None:
    engine = FakeEngine()
    role = make_role(engine)
    async with open_channel(GrpcTransport(), context.address) as channel:
        stream = await start_with_request(role, context, engine, channel)
        engine.step()
        await stream.only_delta()
        assert role._instance is not None
        role._instance.tick()
        text = generate_latest(context.registry).decode()
        await role.stop()
    for line in (
        "penstock_worker_running_requests 1.0",
        "penstock_worker_generated_tokens_total 1.0",
        "penstock_worker_steps_total 1.0",
        "penstock_worker_step_seconds_sum 0.01",
        "penstock_worker_streams 1.0",
        "penstock_worker_stream_message_bytes_count 1.0",
        "penstock_worker_hung 0.0",
        'vllm:num_requests_running{engine="0",model_name="m"} 1.0',
        'vllm:iteration_tokens_total_sum{engine="0",model_name="m"} 1.0',
        'vllm:request_decode_time_seconds_count{engine="0",model_name="m"} 0.0',
    ):
        assert line in text


async def test_a_worker_that_waits_for_its_server_ends_when_it_is_asked_to(context: RoleContext) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    settings = WorkerSettings("", "", engine="attached", engine_arg=(f"url={url}", "start_s=600"))
    role = WorkerRole(settings)
    starting = asyncio.create_task(role.start(context))
    await asyncio.sleep(0)
    context.shutdown.ask(ExitStatus.STOPPED)
    with pytest.raises(EngineFailed, match="asked to end"):
        await asyncio.wait_for(starting, WAIT_S)
    await role.stop()
