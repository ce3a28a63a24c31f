"""The models of the mesh, known from what the workers announce."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mesh.errors import ConfigurationError
from mesh.membership import ChangeKind, Member, MemberChange
from mesh.runtime import Clock, Threads
from mesh.tasks import TaskSet
from services.frontend.errors import bad_request, model_not_found
from services.frontend.text.model_text import ModelText
from services.frontend.workers.pool import WORKER_ROLE

log = logging.getLogger(__name__)

MAX_MODELS = 64
FACTS = ("model_path", "block_tokens", "max_model_len_tokens")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that clients can ask for."""

    name: str
    text: ModelText
    block_tokens: int
    max_model_len_tokens: int
    created_unix_s: int


class ModelCatalogue:
    """Follows the directory. A model stays known when its last worker goes: asking for it is then answered 503
    (come back), not 404 (give up). It is learnt anew when none of its workers is any more as it was learnt."""

    def __init__(self, cache_characters: int, clock: Clock, threads: Threads) -> None:
        self._cache_characters = cache_characters
        self._clock = clock
        self._threads = threads
        self._models: dict[str, ServedModel] = {}
        self._learnt: dict[str, Mapping[str, str]] = {}
        """What each model was learnt from."""
        self._workers: dict[str, Member] = {}
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._tasks = TaskSet("models")

    def on_change(self, change: MemberChange) -> None:
        """Follow the directory; changes of other roles are ignored."""
        member = change.member
        if member.role != WORKER_ROLE:
            return
        if change.kind is not ChangeKind.LEFT:
            self._workers[member.member_id] = member
        elif self._workers.get(member.member_id) == member:
            del self._workers[member.member_id]
        self._learn(member.attributes.get("model", ""))

    def get(self, name: str) -> ServedModel | None:
        """The model, if it is or was served."""
        return self._models.get(name)

    async def find(self, name: str) -> ServedModel | None:
        """The same, waiting for a tokenizer that is being loaded."""
        model = self._models.get(name)
        if model is None and name in self._loading:
            await asyncio.wait((self._loading[name],))
            model = self._models.get(name)
        return model

    def served(self) -> tuple[ServedModel, ...]:
        """Models that have a worker now, by name."""
        names = {member.attributes.get("model", "") for member in self._workers.values()}
        return tuple(self._models[name] for name in sorted(names) if name in self._models)

    async def asked_for(self, name: str) -> ServedModel:
        """The model that a request names, or the only one where it names none. Raises ApiError (404, 400)."""
        name = name or self.only()
        model = await self.find(name)
        if model is None:
            raise model_not_found(name)
        return model

    def only(self) -> str:
        """What a request without a model asks for. Raises ApiError (400) where there is not just one model."""
        served = [model.name for model in self.served()]
        if len(served) != 1:
            raise bad_request(
                f"`model` may be left out where there is one model; here are {len(served)}: {', '.join(served)}.",
                "model",
                "missing_required_parameter",
            )
        return served[0]

    async def stop(self) -> None:
        """Give up what is being loaded."""
        await self._tasks.cancel()

    def _learn(self, name: str) -> None:
        workers = [member for member in self._workers.values() if member.attributes.get("model", "") == name]
        if not name or not workers or name in self._loading:
            return
        if any(_facts(member) == self._learnt.get(name) for member in workers):
            return
        if name not in self._models and len(self._models) >= MAX_MODELS:
            log.error("too many models; this one is not served", extra={"model": name, "limit": MAX_MODELS})
            return
        member = workers[-1]
        task = self._tasks.spawn(self._load(name, member), name=name)
        self._loading[name] = task
        task.add_done_callback(lambda _: self._loading.pop(name, None))

    async def _load(self, name: str, member: Member) -> None:
        """Tokenizers of 128k tokens take a second to load: not on the event loop."""
        path = Path(member.attributes.get("model_path", ""))
        try:
            block_tokens = int(member.attributes["block_tokens"])
            max_model_len_tokens = int(member.attributes["max_model_len_tokens"])
            text = await self._threads.run(ModelText.load, path, self._clock.unix_s, self._cache_characters)
        except (ConfigurationError, KeyError, ValueError) as error:
            log.error(
                "a model cannot be served", extra={"model": name, "worker": member.member_id, "error": str(error)}
            )
            return
        known = self._models.get(name)
        created = int(self._clock.unix_s()) if known is None else known.created_unix_s
        self._models[name] = ServedModel(name, text, block_tokens, max_model_len_tokens, created)
        self._learnt[name] = _facts(member)
        log.info("model known", extra={"model": name, "chunked_tokenisation": text.chunked.chunked})


def _facts(member: Member) -> Mapping[str, str]:
    return {name: member.attributes.get(name, "") for name in FACTS}
