"""The LoRA adapters of the mesh: those that the state store has, and those that workers were started with."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice

import msgspec

from controlplane.model.adapter import (
    ADAPTERS_PREFIX,
    MAX_ADAPTERS,
    Adapter,
    AdapterRecord,
    StaticAdapter,
    check_record,
)
from mesh.membership import ChangeKind, Member, MemberChange
from mesh.store.interface import StateStore
from mesh.store.stored_folder import StoredFolder
from services.frontend.workers.pool import WORKER_ROLE

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KnownAdapter:
    """An adapter that clients can ask for."""

    adapter: Adapter
    base_model: str
    created_unix_s: int = 0
    workers: tuple[str, ...] = ()
    """Those that were started with it; empty for one that was loaded at run time."""
    conflict: str = ""
    """Why nobody can be given it; empty if it can be asked for."""


class AdapterDirectory:
    """Follows the state store and the workers; serves what is known while the store is away."""

    def __init__(self, store: StateStore) -> None:
        self._folder = StoredFolder(store, ADAPTERS_PREFIX, AdapterRecord, check_record, self._on_change)
        self._workers: dict[str, Member] = {}
        """With LoRA adapters, by member id."""
        self._static: Mapping[str, KnownAdapter] = {}
        self._waiting: set[asyncio.Event] = set()

    async def follow(self) -> None:
        """Take in what the store says, for ever."""
        await self._folder.follow()

    @property
    def is_heard(self) -> bool:
        """Whether the store has said what there is."""
        return self._folder.is_heard

    def on_change(self, change: MemberChange) -> None:
        """Follow the directory; changes of other roles are ignored. Adapters stay known when the last worker that was
        started with them goes: asking for one is then answered 503 (come back), not 404 (give up)."""
        member = change.member
        if member.role != WORKER_ROLE:
            return
        if change.kind is not ChangeKind.LEFT and serves_adapters(member):
            self._workers[member.member_id] = member
        elif self._workers.get(member.member_id) == member or change.kind is not ChangeKind.LEFT:
            self._workers.pop(member.member_id, None)
        announced = static_adapters(tuple(self._workers.values()))
        former = {name: known for name, known in self._static.items() if name not in announced}
        self._static = dict(islice((announced | former).items(), MAX_ADAPTERS))

    def find(self, name: str) -> KnownAdapter | None:
        """The adapter of that name. One that was loaded at run time comes first."""
        record = self._folder.records.get(name)
        if record is None:
            return self._static.get(name)
        return KnownAdapter(record.adapter(name), record.base_model, record.created_unix_s)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once the condition holds, which is looked at whenever the store's adapters change."""
        changed = asyncio.Event()
        self._waiting.add(changed)
        try:
            while not condition():
                await changed.wait()
                changed.clear()
        finally:
            self._waiting.discard(changed)

    def names(self) -> tuple[str, ...]:
        """Of all adapters, in order."""
        return tuple(sorted({*self._folder.records, *self._static}))

    def workers(self, base_model: str = "") -> tuple[Member, ...]:
        """Workers that serve adapters: of this model, or all."""
        return tuple(each for each in self._workers.values() if base_model in ("", each.attributes.get("model")))

    def _on_change(self, name: str, record: AdapterRecord | None) -> None:
        log.info("LoRA adapter changed", extra={"adapter": name, "record": str(record)})
        for waiting in self._waiting:
            waiting.set()


def serves_adapters(member: Member) -> bool:
    """Whether the engine of a worker takes LoRA adapters, by what the worker announces."""
    return member.attributes.get("max_loras", "0") not in ("", "0")


def static_adapters(workers: tuple[Member, ...]) -> dict[str, KnownAdapter]:
    """The adapters that workers were started with, by name; workers must agree on what a name stands for."""
    found: dict[str, KnownAdapter] = {}
    for member in sorted(workers, key=lambda each: each.member_id):
        model = member.attributes.get("model", "")
        for each in _announced(member):
            adapter = Adapter(each.name, each.digest, each.path, each.is_3d_lora_weight)
            known = found.setdefault(each.name, KnownAdapter(adapter, model))
            conflict = known.conflict
            if (known.base_model, known.adapter.digest) != (model, each.digest):
                conflict = (
                    f"workers were started with different LoRA adapters of the name {each.name!r}: "
                    f"{known.workers[0]} with checksum {known.adapter.digest} for {known.base_model}, "
                    f"{member.member_id} with {each.digest} for {model}"
                )
                log.error("a LoRA adapter cannot be served", extra={"adapter": each.name, "reason": conflict})
            found[each.name] = KnownAdapter(
                known.adapter, known.base_model, 0, (*known.workers, member.member_id), conflict
            )
    return found


def _announced(member: Member) -> list[StaticAdapter]:
    announced = member.attributes.get("lora_modules", "")
    try:
        return msgspec.json.decode(announced, type=list[StaticAdapter]) if announced else []
    except msgspec.MsgspecError as error:
        log.error(
            "a worker announces adapters that cannot be read",
            extra={"worker": member.member_id, "error": str(error)},
        )
        return []
