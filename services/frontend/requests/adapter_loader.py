"""Loads a LoRA adapter into the mesh, and takes it out again.

All workers of the base model load it first. Only when one of them has, and all that have agree on its checksum, does
the state store get to know it, from which every frontend and every worker learns of it, those that join later too. The
words and statuses are vLLM's where it has some.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import grpc
import msgspec

from controlplane.model.adapter import ADAPTERS_PREFIX, MAX_ADAPTERS, MAX_NAME_CHARACTERS, AdapterRecord
from mesh.errors import StoreError
from mesh.membership import Member
from mesh.rpc.client import open_channel
from mesh.runtime import Transport
from mesh.store.interface import StateStore
from penstock.v1 import request_pb2, worker_pb2, worker_pb2_grpc
from services.frontend.errors import ApiError, bad_request, model_not_found, unavailable
from services.frontend.requests.adapters import AdapterDirectory

log = logging.getLogger(__name__)

LOAD_DEADLINE_S: Final = 120.0
"""For a worker to read the adapter's files and to put it into its engine."""
UNLOAD_DEADLINE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """What became of a load."""

    name: str
    base_model: str
    digest: str
    workers: tuple[str, ...]
    """Those that have loaded it."""
    refusals: tuple[str, ...]
    """What the others said."""


@dataclass(frozen=True, slots=True)
class _Answer:
    worker: Member
    digest: str = ""
    refusal: str = ""
    is_missing: bool = False
    """There is no adapter at the path."""


class AdapterLoader:
    """For one process; two that load at the same time are kept apart by the store."""

    def __init__(
        self,
        store: StateStore,
        directory: AdapterDirectory,
        is_model: Callable[[str], bool],
        transport: Transport,
        unix_time: Callable[[], float],
    ) -> None:
        """`is_model`: whether a name is a model's or a cascade's."""
        self._store = store
        self._directory = directory
        self._is_model = is_model
        self._transport = transport
        self._unix_time = unix_time

    async def load(
        self, name: str, path: str, base_model: str = "", *, in_place: bool = False, is_3d_lora_weight: bool = False
    ) -> LoadedAdapter:
        """Raises ApiError: 400 for what is asked for wrongly, 404 where no worker finds the adapter, 409 where workers
        find different ones, 503 without workers or the store. Nothing is loaded then, and nothing is different."""
        self._check(name, path)
        key = ADAPTERS_PREFIX + name
        try:
            former = await self._store.get(key)
        except StoreError as error:
            raise _store_away(error) from error
        self._check_is_free(name, is_loaded=former is not None, in_place=in_place)
        workers = self._workers(base_model)
        asked = request_pb2.Adapter(name=name, path=path, is_3d_lora_weight=is_3d_lora_weight)
        answers = await asyncio.gather(*(self._load_at(worker, asked) for worker in workers))
        loaded = [answer for answer in answers if answer.digest]
        try:
            digest = _agreed(name, path, answers)
            record = AdapterRecord(
                workers[0].attributes.get("model", ""), path, digest, int(self._unix_time()), is_3d_lora_weight
            )
            await self._announce(key, record, 0 if former is None else former.mod_revision)
        except ApiError:
            kept = set() if former is None else {msgspec.json.decode(former.value, type=AdapterRecord).digest}
            kept |= {each.adapter.digest for each in map(self._directory.find, self._directory.names()) if each}
            await self._take_back([answer for answer in loaded if answer.digest not in kept])
            raise
        refusals = tuple(answer.refusal for answer in answers if answer.refusal)
        for refusal in refusals:
            log.warning("a worker cannot load a LoRA adapter", extra={"adapter": name, "reason": refusal})
        log.info("LoRA adapter loaded", extra={"adapter": name, "path": path, "digest": digest})
        return LoadedAdapter(name, record.base_model, digest, tuple(each.worker.member_id for each in loaded), refusals)

    async def unload(self, name: str) -> None:
        """Requests that it answers go on to their end. Raises ApiError (400, 404, 503)."""
        if not name:
            raise _wrong("'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name")
        try:
            found = await self._store.delete(ADAPTERS_PREFIX + name)
        except StoreError as error:
            raise _store_away(error) from error
        if not found:
            known = self._directory.find(name)
            if known is not None and known.workers:
                started = ", ".join(known.workers)
                raise _wrong(
                    f"The lora adapter '{name}' is one that {started} started with (lora_modules): take it out of the "
                    "engine arguments there.",
                    "lora_name",
                )
            raise ApiError(
                404, f"The lora adapter '{name}' cannot be found.", "NotFoundError", "lora_name", "model_not_found"
            )
        log.info("LoRA adapter unloaded", extra={"adapter": name})

    def _check(self, name: str, path: str) -> None:
        if not name or not path:
            message = "Both 'lora_name' and 'lora_path' must be provided."
            raise _wrong(message, "lora_path" if name else "lora_name")
        if len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
            message = f"The name of an adapter has at most {MAX_NAME_CHARACTERS} characters, all of them printable."
            raise _wrong(message, "lora_name")
        if self._is_model(name):
            raise _wrong(f"The lora adapter '{name}' conflicts with a served base model.", "lora_name")

    def _check_is_free(self, name: str, *, is_loaded: bool, in_place: bool) -> None:
        known = self._directory.find(name)
        if not is_loaded and known is not None and known.workers:
            started = ", ".join(known.workers)
            raise _wrong(
                f"The lora adapter '{name}' is one that {started} started with (lora_modules), and cannot be replaced.",
                "lora_name",
            )
        if is_loaded and not in_place:
            raise _wrong(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True.",
                "lora_name",
            )
        if not is_loaded and len(self._directory.names()) >= MAX_ADAPTERS:
            raise _wrong(f"{MAX_ADAPTERS} adapters are loaded, as many as there may be: unload one.", "lora_name")

    def _workers(self, base_model: str) -> tuple[Member, ...]:
        workers = self._directory.workers(base_model)
        models = sorted({worker.attributes.get("model", "") for worker in workers})
        if len(models) > 1:
            raise _wrong(f"Name the adapter's base model, one of {', '.join(models)}.", "base_model_name")
        if not workers and base_model and not self._is_model(base_model):
            error = model_not_found(base_model)
            error.param = "base_model_name"
            raise error
        if not workers:
            of = f" of `{base_model}`" if base_model else ""
            message = f"No worker{of} serves LoRA adapters: start one with --engine-arg enable_lora=true."
            raise _wrong(message, "base_model_name")
        return workers

    async def _load_at(self, worker: Member, adapter: request_pb2.Adapter) -> _Answer:
        said = f"{worker.member_id} says: "
        try:
            async with open_channel(self._transport, worker.address, worker.role) as channel:
                stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
                request = worker_pb2.LoadAdapterRequest(adapter=adapter)
                response = await stub.LoadAdapter(request, timeout=LOAD_DEADLINE_S)
                return _Answer(worker, response.digest)
        except grpc.aio.AioRpcError as error:
            is_missing = error.code() is grpc.StatusCode.NOT_FOUND
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                said = f"{worker.member_id} cannot be reached: "
            return _Answer(worker, refusal=f"{said}{error.details() or error.code().name}", is_missing=is_missing)

    async def _announce(self, key: str, record: AdapterRecord, former_revision: int) -> None:
        try:
            written = await self._store.compare_and_swap(key, former_revision, msgspec.json.encode(record))
        except StoreError as error:
            raise _store_away(error) from error
        if written is None:
            name = key.removeprefix(ADAPTERS_PREFIX)
            raise _wrong(f"The lora adapter '{name}' was loaded or unloaded by somebody else just now.", "lora_name")

    async def _take_back(self, loaded: Sequence[_Answer]) -> None:
        """Nobody is to ask for it, so that it would only stand in the way of others."""
        await asyncio.gather(*(self._unload_at(answer) for answer in loaded))

    async def _unload_at(self, answer: _Answer) -> None:
        try:
            async with open_channel(self._transport, answer.worker.address, answer.worker.role) as channel:
                stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
                request = worker_pb2.UnloadAdapterRequest(digest=answer.digest)
                await stub.UnloadAdapter(request, timeout=UNLOAD_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            log.warning(
                "a LoRA adapter that nobody asks for stays loaded until room is needed",
                extra={"worker": answer.worker.member_id, "error": str(error.details())},
            )


def _agreed(name: str, path: str, answers: Sequence[_Answer]) -> str:
    """The checksum that all workers found which have loaded it. Raises ApiError."""
    found = {answer.digest: answer.worker.member_id for answer in reversed(answers) if answer.digest}
    if not found:
        said = "; ".join(answer.refusal for answer in answers)
        status = 404 if all(answer.is_missing for answer in answers) else 400
        kind = "NotFoundError" if status == 404 else "BadRequestError"
        raise ApiError(status, f"No worker can load the lora adapter '{name}' from {path}: {said}.", kind, "lora_path")
    if len(found) > 1:
        said = ", ".join(f"{worker} {digest}" for digest, worker in sorted(found.items()))
        message = f"The workers find different adapters at {path}, by checksum: {said}. Copy one of them to all."
        raise ApiError(409, message, "BadRequestError", "lora_path", "adapter_conflict")
    return next(iter(found))


def _wrong(message: str, param: str) -> ApiError:
    error = bad_request(message, param)
    error.type = "InvalidUserInput"
    return error


def _store_away(error: StoreError) -> ApiError:
    return unavailable(f"The state store does not answer, so that nobody can be told of the adapter: {error}.")
