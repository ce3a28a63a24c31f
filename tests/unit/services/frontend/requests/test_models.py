"""What a frontend knows of models follows what their workers announce."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from controlplane.model.adapter import Adapter
from mesh.errors import ConfigurationError, ProtocolViolation
from mesh.membership import ChangeKind, Member, MemberChange
from mesh.rpc.server import RpcServer
from mesh.runtime import GrpcTransport, SystemThreads, system_runtime
from mesh.store import open_store
from mesh.text_files import MAX_TEXT_BYTES, PIECE_BYTES, TextFiles, pieces, read_text_files, text_hash
from penstock.v1 import worker_pb2, worker_pb2_grpc
from services.frontend.errors import ApiError
from services.frontend.requests.adapters import AdapterDirectory, KnownAdapter
from services.frontend.requests.models import ModelCatalogue
from services.frontend.workers.text_files import fetch_text_files
from tests.still_clock import StillClock

pytestmark = pytest.mark.live


def worker(name: str, model_path: Path, block_tokens: int) -> Member:
    facts = {"block_tokens": str(block_tokens), "max_model_len_tokens": "4096"}
    return Member("worker", name, "1", "127.0.0.1:1", "", {"model": "demo", "model_path": str(model_path), **facts})


def no_adapters() -> AdapterDirectory:
    return AdapterDirectory(open_store("embedded:", system_runtime()))


async def settled(catalogue: ModelCatalogue) -> int:
    """The block size, once nothing is being loaded."""
    for loading in list(catalogue._loading.values()):
        await loading
    model = await catalogue.find("demo")
    assert model is not None
    return model.block_tokens


async def test_a_model_whose_workers_all_come_back_otherwise_is_learnt_anew(model_path: Path) -> None:
    clock = StillClock(unix_at_s=1.0)
    catalogue = ModelCatalogue(1000, clock, SystemThreads(), GrpcTransport(), no_adapters())

    def changed(kind: ChangeKind, member: Member) -> None:
        catalogue.on_change(MemberChange(kind, member))

    former, other = worker("a", model_path, 16), worker("b", model_path, 16)
    changed(ChangeKind.JOINED, former)
    changed(ChangeKind.JOINED, other)
    assert await settled(catalogue) == 16
    clock.unix_at_s = 2.0
    changed(ChangeKind.LEFT, former)
    changed(ChangeKind.JOINED, worker("a", model_path, 32))
    assert await settled(catalogue) == 16, "as long as there is one of these"
    changed(ChangeKind.LEFT, other)
    assert await settled(catalogue) == 32, "hashes of other blocks would be found in no prefix cache"
    model = catalogue.get("demo")
    assert model is not None
    assert model.created_unix_s == 1
    await catalogue.stop()


async def test_before_any_worker_has_come_nobody_is_told_that_a_model_does_not_exist(model_path: Path) -> None:
    adapters = no_adapters()
    catalogue = ModelCatalogue(1000, StillClock(), SystemThreads(), GrpcTransport(), adapters)
    for name in ("demo", ""):
        with pytest.raises(ApiError) as refused:
            await catalogue.asked_for(name)
        assert (refused.value.status, refused.value.code) == (503, "no_instance")
    catalogue.on_change(MemberChange(ChangeKind.JOINED, worker("a", model_path, 16)))
    with pytest.raises(ApiError) as refused:
        await catalogue.asked_for("other")
    assert refused.value.status == 503, "it may be an adapter, of which the store has not told yet"
    following = asyncio.create_task(adapters.follow())
    async with asyncio.timeout(5.0):
        while not adapters.is_heard:  # noqa: ASYNC110
            await asyncio.sleep(0)
    with pytest.raises(ApiError) as refused:
        await catalogue.asked_for("other")
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")
    following.cancel()
    assert (await catalogue.asked_for("")).name == "demo"
    await catalogue.stop()


@dataclass
class TextWorker(worker_pb2_grpc.WorkerServicer):
    """Hands out its files, but for the first `failures` times."""

    files: TextFiles
    failures: int = 0
    asked: list[str] = field(default_factory=list)

    async def GetTextFiles(
        self, request: worker_pb2.GetTextFilesRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.TextFilePiece]:
        self.asked.append(request.text_hash)
        if len(self.asked) <= self.failures:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        for file, content in pieces(self.files):
            yield worker_pb2.TextFilePiece(file=file, content=content)


def elsewhere(address: str, name: str, wanted_hash: str) -> Member:
    """A worker on another machine: its directory is not here."""
    facts = {"block_tokens": "16", "max_model_len_tokens": "4096", "text_hash": wanted_hash}
    return Member("worker", name, "1", address, "", {"model": name, "model_path": "/nowhere", **facts})


async def test_a_frontend_needs_no_checkpoint(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.frontend.requests.models.RETRY_PAUSES_S", (0.0, 0.0, 0.0))
    files = read_text_files(model_path)
    worker, server = TextWorker(files, failures=1), RpcServer(GrpcTransport())
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, worker, "penstock.v1.Worker")
    await server.start()
    catalogue = ModelCatalogue(1000, StillClock(), SystemThreads(), GrpcTransport(), no_adapters())
    joined = MemberChange(ChangeKind.JOINED, elsewhere(server.address, "a", text_hash(files)))
    catalogue.on_change(joined)
    async with asyncio.timeout(10.0):
        model = await catalogue.find("a")
    assert model is not None
    assert model.text.template is not None
    assert len(worker.asked) == 2, "one that fails is asked again"
    catalogue.on_change(MemberChange(ChangeKind.JOINED, elsewhere(server.address, "b", text_hash(files))))
    async with asyncio.timeout(10.0):
        other = await catalogue.find("b")
    assert other is not None
    assert other.text is model.text
    assert len(worker.asked) == 2, "what is known by its hash is not asked for again"
    await catalogue.stop()
    await server.stop(0)


async def test_what_a_worker_sends_must_be_what_it_announced() -> None:
    server = RpcServer(GrpcTransport())
    server.add(
        worker_pb2_grpc.add_WorkerServicer_to_server, TextWorker({"tokenizer.json": b"{}"}), "penstock.v1.Worker"
    )
    await server.start()
    with pytest.raises(ProtocolViolation, match="other files than it has announced"):
        await fetch_text_files(elsewhere(server.address, "a", "f" * 64), GrpcTransport(), "f" * 64)
    await server.stop(0)


async def test_what_is_no_tokenizer_is_not_taken() -> None:
    server = RpcServer(GrpcTransport())
    server.add(
        worker_pb2_grpc.add_WorkerServicer_to_server, TextWorker({"model.safetensors": b""}), "penstock.v1.Worker"
    )
    await server.start()
    with pytest.raises(ProtocolViolation, match="not a tokenizer"):
        await fetch_text_files(elsewhere(server.address, "a", "f" * 64), GrpcTransport(), "f" * 64)
    await server.stop(0)


@pytest.mark.slow
def test_text_files_are_bounded_and_told_apart_by_content(tmp_path: Path) -> None:
    assert text_hash(read_text_files(tmp_path)) == ""
    (tmp_path / "config.json").write_bytes(b"x" * (PIECE_BYTES + 1))
    (tmp_path / "tokenizer.json").touch()
    files = read_text_files(tmp_path)
    assert [(name, len(piece)) for name, piece in pieces(files)] == [
        ("tokenizer.json", 0),
        ("config.json", PIECE_BYTES),
        ("config.json", 1),
    ]
    assert text_hash(files) != text_hash({**files, "tokenizer.json": b"{}"})
    with (tmp_path / "tokenizer.json").open("wb") as large:
        large.truncate(MAX_TEXT_BYTES)
    with pytest.raises(ConfigurationError, match="over 134217728 bytes"):
        read_text_files(tmp_path)


class Adapters:
    """Adapters of the model `demo`, by name, and when they were loaded."""

    def __init__(self, loaded_s: dict[str, int], takes_them: Member) -> None:
        self._loaded_s = loaded_s
        self._worker = takes_them

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._loaded_s))

    def find(self, name: str) -> KnownAdapter | None:
        known = self._loaded_s.get(name)
        return None if known is None else KnownAdapter(Adapter(name, "0a", f"/{name}"), "demo", known)

    def workers(self, base_model: str = "") -> tuple[Member, ...]:
        return (self._worker,)

    def on_change(self, change: MemberChange) -> None:
        """There is one worker, and it stays."""


async def test_adapters_are_listed_in_the_order_in_which_they_were_loaded(model_path: Path) -> None:
    member = worker("a", model_path, 16)
    adapters: Any = Adapters({"zoe": 0, "bob": 7, "ann": 9, "cat": 7}, member)
    catalogue = ModelCatalogue(1000, StillClock(unix_at_s=1.0), SystemThreads(), GrpcTransport(), adapters)
    catalogue.on_change(MemberChange(ChangeKind.JOINED, member))
    assert await settled(catalogue) == 16
    assert [model.name for model in catalogue.served()] == ["demo", "zoe", "bob", "cat", "ann"]
