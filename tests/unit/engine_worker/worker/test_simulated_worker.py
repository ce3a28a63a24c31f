"""A whole worker with the simulated engine, as a process of its own."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from mesh.rpc.client import open_channel
from mesh.runtime import GrpcTransport
from penstock.v1 import request_pb2, worker_pb2_grpc
from tests.unit.engine_worker.worker.running_worker import FrontendStream

ROOT = Path(__file__).resolve().parents[4]
MODEL = "demo-small"
QUICK = ("instance.kv_blocks=600", "time_scale=0.02", "instance.output.median_tokens=30")
END_S = 20.0


def sampling(max_tokens: int = 60, *, ignore_eos: bool = False) -> request_pb2.SamplingParams:
    return request_pb2.SamplingParams(max_tokens=max_tokens, top_p=1, repetition_penalty=1, ignore_eos=ignore_eos)


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A process and the address it serves."""

    process: asyncio.subprocess.Process
    address: str


@asynccontextmanager
async def worker_process(*options: str) -> AsyncIterator[WorkerProcess]:
    """`penstock serve worker` with a store of its own, once it serves; killed if the test leaves it running."""
    arguments = ("--store", "embedded:", "--member-id", "worker-0", "--engine", "simulated")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "services.cli.main", "serve", "worker", *arguments),
        *("--model", MODEL, "--model-path", str(ROOT / "demo" / "models" / MODEL)),
        *(word for option in QUICK for word in ("--engine-arg", option)),
        *options,
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield WorkerProcess(process, await _address(process))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _address(process: asyncio.subprocess.Process) -> str:
    """Where the process serves, from its log."""
    assert process.stderr is not None
    lines: list[bytes] = []
    async with asyncio.timeout(END_S):
        async for line in process.stderr:
            lines.append(line)
            if b'"message": "serving"' in line:
                return str(json.loads(line)["address"])
    raise AssertionError(b"".join(lines).decode())


async def all_tokens(stream: FrontendStream, request_ids: set[str]) -> dict[str, list[int]]:
    """Tokens of each request until the last one has ended; nothing may be lost, doubled or out of order."""
    tokens: dict[str, list[int]] = {request_id: [] for request_id in request_ids}
    open_ids = set(request_ids)
    while open_ids:
        for request_id, delta in (await stream.deltas()).items():
            assert request_id in open_ids
            assert not delta.HasField("error"), delta.error.message
            assert delta.offset == len(tokens[request_id])
            tokens[request_id] += delta.token_ids
            if delta.finish_reason:
                open_ids.remove(request_id)
    return tokens


async def frontend(stub: Any, name: str) -> FrontendStream:
    stream = FrontendStream(stub.Stream())
    await stream.hello(name)
    return stream


@pytest.mark.process
async def test_many_requests_over_three_streams_then_a_drain_that_cuts_nothing() -> None:
    async with worker_process() as worker, open_channel(GrpcTransport(), worker.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        streams = [await frontend(stub, f"frontend-{number}") for number in range(3)]
        for number in range(20):
            for index, stream in enumerate(streams):
                prompt = [6 + number, *range(10, 60)]
                await stream.generate(
                    f"{index}-{number}", prompt_token_ids=prompt, model=MODEL, sampling=sampling(), deadline_ms=60_000
                )
        async with asyncio.timeout(END_S):
            heard = [
                await all_tokens(stream, {f"{index}-{number}" for number in range(20)})
                for index, stream in enumerate(streams)
            ]
        assert len({len(tokens) for tokens in heard[0].values()}) > 3, "lengths differ from prompt to prompt"
        for number in range(20):
            alike = {tuple(heard[index][f"{index}-{number}"]) for index in range(3)}
            assert len(alike) == 1, "equal prompts have equal answers, whichever stream asks"

        # No step has room between a SIGTERM and the answer that must survive it unless the request is long.
        await streams[0].generate("last", model=MODEL, sampling=sampling(400, ignore_eos=True))
        first = await streams[0].only_delta()
        worker.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(END_S):
            count = len(first.token_ids)
            while not (delta := await streams[0].only_delta()).finish_reason:
                count += len(delta.token_ids)
            assert count + len(delta.token_ids) == 400
            assert await streams[0].read() is grpc.aio.EOF
            assert await worker.process.wait() == 0


@pytest.mark.process
async def test_a_second_signal_cuts_the_drain_and_says_so_to_the_frontend() -> None:
    async with (
        worker_process("--engine-arg", "cost.fixed_ms=1000") as worker,
        open_channel(GrpcTransport(), worker.address) as channel,
    ):
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        stream = await frontend(stub, "frontend-0")
        await stream.generate("a", model=MODEL, sampling=sampling(2000, ignore_eos=True))
        await stream.only_delta()
        worker.process.send_signal(signal.SIGTERM)
        await stream.only_delta()
        worker.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(END_S):
            while not (delta := await stream.only_delta()).finish_reason:
                continue
            assert delta.error.code == request_pb2.ERROR_CODE_UNAVAILABLE
            assert await worker.process.wait() == 0


@pytest.mark.process
async def test_emitted_tokens_are_gone_on_from() -> None:
    async with worker_process() as worker, open_channel(GrpcTransport(), worker.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        stream = await frontend(stub, "frontend-0")
        options: dict[str, Any] = {"model": MODEL, "sampling": sampling(40, ignore_eos=True)}
        await stream.generate("whole", **options)
        whole = (await all_tokens(stream, {"whole"}))["whole"]
        await stream.generate("rest", emitted_token_ids=whole[:15], **options)
        rest: list[int] = []
        async with asyncio.timeout(END_S):
            while True:
                delta = await stream.only_delta()
                assert delta.offset == 15 + len(rest)
                rest += delta.token_ids
                if delta.finish_reason:
                    break
        assert whole[:15] + rest == whole
        worker.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(worker.process.wait(), END_S) == 0
