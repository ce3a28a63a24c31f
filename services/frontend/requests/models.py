"""The models of the mesh, known from what the workers announce."""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from controlplane.model.adapter import Adapter
from controlplane.model.media_facts import MediaFacts, facts_of
from controlplane.model.pooling import GENERATE
from controlplane.model.request import SamplingParams
from controlplane.model.sampling import parameters
from mesh.errors import ConfigurationError, PeerUnavailable, RpcError
from mesh.membership import ChangeKind, Member, MemberChange
from mesh.runtime import Clock, Threads, Transport
from mesh.tasks import TaskSet
from mesh.text_files import TextFiles, read_text_files, text_hash
from penstock.v1 import parser_pb2
from services.frontend.errors import ApiError, bad_request, model_not_found, unavailable
from services.frontend.parser_process.answer import OutsideParsers
from services.frontend.parser_process.process import ParserProcess
from services.frontend.parser_process.prompts import OutsidePrompts
from services.frontend.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from services.frontend.requests.adapters import AdapterDirectory
from services.frontend.text.model_text import ModelText
from services.frontend.workers.pool import WORKER_ROLE
from services.frontend.workers.text_files import fetch_text_files

log = logging.getLogger(__name__)

MAX_MODELS = 64
FACTS = (
    "model_path",
    "text_hash",
    "tasks",
    "pair_form",
    "media",
    "block_tokens",
    "max_model_len_tokens",
    "sampling_defaults",
    "tool_call_parser",
    "reasoning_parser",
    "tokenizer_mode",
)
HARMONY_MODEL_TYPE = "gpt_oss"
HARMONY_PARSER = "openai_gptoss"
"""The models whose prompts vLLM makes by OpenAI's Harmony, whatever their chat template says, and the name of its
parser."""
RETRY_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 5.0, 5.0, 5.0, 5.0)
"""Before another worker is asked for a tokenizer, when one did not give it."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that clients can ask for."""

    name: str
    text: ModelText
    block_tokens: int
    max_model_len_tokens: int
    created_unix_s: int
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of sampling parameters that a request leaves out, by the names of `SamplingParams`."""
    tool_call_parser: str = ""
    """vLLM's name of the form in which it calls tools; empty: it does so only where a grammar makes it."""
    reasoning_parser: str = ""
    """vLLM's name of how it marks its reasoning; empty: it does not."""
    tasks: tuple[str, ...] = (GENERATE,)
    """What it can do: generate, or tasks of a pooling model, first what it is for."""
    outside: OutsideParsers | None = None
    """Where one of the two parsers is not our own."""
    prompts: OutsidePrompts | None = None
    """vLLM's rendering, where this machine can run it."""
    media: Mapping[str, MediaFacts] = field(default_factory=dict)
    """What it takes besides text, by modality."""
    adapter: Adapter | None = None
    """The LoRA adapter that makes it another model than the one it is based on; None: it is no adapter."""
    base_model: str = ""
    """Of an adapter."""
    pair_form: str = ""
    """How a cross-encoder takes two texts, as its workers announce it."""

    @property
    def engine_model(self) -> str:
        """The model whose instances serve it; metrics go by it, because adapters may be many."""
        return self.base_model or self.name

    def adapted(self, adapter: Adapter, created_unix_s: int = 0) -> "ServedModel":
        """The same under a LoRA adapter."""
        created = created_unix_s or self.created_unix_s
        return replace(self, name=adapter.name, adapter=adapter, base_model=self.name, created_unix_s=created)


class ModelCatalogue:
    """Follows the directory. A model stays known when its last worker goes: asking for it is then answered 503
    (come back), not 404 (give up). It is learnt anew when none of its workers is any more as it was learnt."""

    def __init__(
        self,
        cache_bytes: int,
        clock: Clock,
        threads: Threads,
        transport: Transport,
        adapters: AdapterDirectory,
        parser_process: ParserProcess | None = None,
        *,
        reads_answers: bool = True,
    ) -> None:
        """`parser_process`: for models whose prompts or answers take vLLM's own parts.
        `reads_answers`: False where somebody else reads them, so that models are served whatever their parsers are."""
        self.adapters = adapters
        self._transport = transport
        self._parser_process = parser_process
        self._reads_answers = reads_answers
        self._refused: dict[str, str] = {}
        """Why a model that there are workers of is not served."""
        self._texts: WeakValueDictionary[str, ModelText] = WeakValueDictionary()
        """By the hash of what they were made from."""
        self._cache_bytes = cache_bytes
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
        self.adapters.on_change(change)
        self._learn(member.attributes.get("model", ""))

    def get(self, name: str) -> ServedModel | None:
        """The model, if it is or was served."""
        return self._models.get(name)

    def is_model(self, name: str) -> bool:
        """Whether a worker announces this model, or did so; adapters are none."""
        return name in self._models or bool(self._workers_of(name))

    async def find(self, name: str) -> ServedModel | None:
        """The same, waiting for a tokenizer that is being loaded, and LoRA adapters. Raises ApiError (409) for one of
        which nobody knows which it is."""
        known = None if self.is_model(name) else self.adapters.find(name)
        if known is not None:
            if known.conflict:
                raise ApiError(409, f"{known.conflict}.", param="model", code="adapter_conflict")
            base = await self.find(known.base_model)
            return None if base is None else base.adapted(known.adapter, known.created_unix_s)
        model = self._models.get(name)
        if model is None and name in self._loading:
            await asyncio.wait((self._loading[name],))
            model = self._models.get(name)
        return model

    @property
    def is_empty(self) -> bool:
        """Whether no worker has come yet, or all that had have gone again before anything was learnt of a model."""
        return not self._models and not self._workers and not self._loading

    def served(self) -> tuple[ServedModel, ...]:
        """Models that have a worker now, by name, and then their adapters, in the order in which they were loaded."""
        names = {member.attributes.get("model", "") for member in self._workers.values()}
        models = [self._models[name] for name in sorted(names) if name in self._models]
        return (*models, *self._served_adapters())

    def _served_adapters(self) -> Iterator[ServedModel]:
        bases = {member.attributes.get("model", "") for member in self.adapters.workers()}
        found = [known for name in self.adapters.names() if (known := self.adapters.find(name)) is not None]
        for known in sorted(found, key=lambda each: each.created_unix_s):
            if (
                not self.is_model(known.adapter.name)
                and not known.conflict
                and known.base_model in bases & self._models.keys()
            ):
                yield self._models[known.base_model].adapted(known.adapter, known.created_unix_s)

    async def asked_for(self, name: str) -> ServedModel:
        """The model that a request names, or the only one where it names none. Raises ApiError: 404, 400, or 503 from a
        frontend to which no worker has come yet, which cannot say what the mesh serves."""
        if self.is_empty:
            raise unavailable("No worker has come to this frontend yet; try again.", "no_instance")
        name = name or self.only()
        model = await self.find(name)
        if model is None and not self.adapters.is_heard:
            raise unavailable("The state store has not said yet which LoRA adapters there are; try again.")
        if model is None:
            if name in self._refused and self._workers_of(name):
                raise unavailable(f"`{name}` cannot be served: {self._refused[name]}.", "model_not_ready")
            raise model_not_found(name)
        return model

    def only(self) -> str:
        """What a request without a model asks for. Raises ApiError (400) where there is not just one model."""
        announced = sorted({member.attributes.get("model", "") for member in self._workers.values()} - {""})
        if len(announced) != 1:
            raise bad_request(
                f"`model` may be left out where there is one model; here are {len(announced)}: {', '.join(announced)}.",
                "model",
                "missing_required_parameter",
            )
        return announced[0]

    async def stop(self) -> None:
        """Give up what is being loaded."""
        await self._tasks.cancel()

    def _learn(self, name: str) -> None:
        workers = self._teachers_of(name)
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
        for pause_s in RETRY_PAUSES_S:
            try:
                block_tokens = int(member.attributes["block_tokens"])
                max_model_len_tokens = int(member.attributes["max_model_len_tokens"])
                defaults = read_defaults(member.attributes.get("sampling_defaults", ""))
                media = facts_of(member.attributes.get("media", ""))
                text = await self._text(member)
                parsers = _parsers(member, text)
                outside = await self._outside(member, *parsers)
                prompts = await self._prompts(name, member, text, outside)
                break
            except (ConfigurationError, KeyError, ValueError) as error:
                log.error(
                    "a model cannot be served", extra={"model": name, "worker": member.member_id, "error": str(error)}
                )
                self._refused[name] = str(error)
                return
            except RpcError as error:
                log.warning(
                    "a model is not ready", extra={"model": name, "worker": member.member_id, "error": str(error)}
                )
            await asyncio.sleep(pause_s)
            workers = self._teachers_of(name)
            if not workers:
                return
            member = workers[(workers.index(member) + 1) % len(workers)] if member in workers else workers[-1]
        else:
            log.error("a model cannot be served: no worker gives its tokenizer", extra={"model": name})
            return
        known = self._models.get(name)
        created = int(self._clock.unix_s()) if known is None else known.created_unix_s
        self._models[name] = ServedModel(
            name,
            text,
            block_tokens,
            max_model_len_tokens,
            created,
            defaults,
            *parsers,
            _tasks(member),
            outside,
            prompts,
            # The process has a model's text, and not what its images take.
            {} if prompts is not None and prompts.is_only_way else media,
            pair_form=member.attributes.get("pair_form", ""),
        )
        self._refused.pop(name, None)
        self._learnt[name] = _facts(member)
        log.info("model known", extra={"model": name, "chunked_tokenisation": text.chunked.chunked})

    async def _text(self, member: Member) -> ModelText:
        """From this machine's own disk where that holds the same, else from the worker. Raises ConfigurationError and
        RpcError."""
        wanted_hash = member.attributes.get("text_hash", "")
        if wanted_hash in self._texts:
            return self._texts[wanted_hash]
        files, origin = await self._files(member)
        text = await self._threads.run(
            ModelText.from_files, files, origin, self._clock.unix_s, self._cache_bytes, self._clock.now_s
        )
        if wanted_hash:
            self._texts[wanted_hash] = text
        return text

    async def _files(self, member: Member) -> tuple[TextFiles, str]:
        """The contents, and where they are from. Raises ConfigurationError and RpcError."""
        path, wanted_hash = Path(member.attributes.get("model_path", "")), member.attributes.get("text_hash", "")
        files: TextFiles | None = await self._threads.run(_own_files, path, wanted_hash)
        if files is not None:
            return files, str(path)
        files = await fetch_text_files(member, self._transport, wanted_hash)
        extra = {"worker": member.member_id, "bytes": sum(len(content) for content in files.values())}
        log.info("a tokenizer came from a worker", extra=extra)
        return files, member.member_id

    async def _outside(self, member: Member, tools: str, reasoning: str) -> OutsideParsers | None:
        """Where the parsers are not all our own. Raises ConfigurationError and RpcError."""
        if not self._reads_answers:
            return None
        if (not tools or tools in TOOL_PARSERS) and (not reasoning or reasoning in REASONING_PARSERS):
            return None
        if self._parser_process is None:
            raise ConfigurationError(f"there is no process here for vLLM's parsers {tools} {reasoning}")
        directory = await self._folder(member)
        model = parser_pb2.ParserModel(
            directory=str(directory),
            tokenizer_mode=member.attributes.get("tokenizer_mode", ""),
            tool_parser=tools,
            reasoning_parser=reasoning,
        )
        await self._parser_process.load(model)
        return OutsideParsers(self._parser_process, model)

    async def _prompts(
        self, name: str, member: Member, text: ModelText, outside: OutsideParsers | None
    ) -> OutsidePrompts | None:
        """Made sure of where vLLM has a way of its own to make this model's prompts. Raises ConfigurationError and
        RpcError."""
        mode = member.attributes.get("tokenizer_mode", "")
        has_own_way = bool(mode) or text.model_type == HARMONY_MODEL_TYPE
        process = self._parser_process
        if GENERATE not in _tasks(member) or not (has_own_way or (process is not None and process.is_possible)):
            return None

        async def folder() -> Path:
            workers = self._teachers_of(name)
            if not workers:
                raise PeerUnavailable(f"no worker of `{name}` is here to give its files")
            return await self._folder(workers[-1])

        model = parser_pb2.ParserModel(
            tokenizer_mode=mode, max_model_len_tokens=int(member.attributes["max_model_len_tokens"])
        )
        if outside is not None:
            model.tool_parser, model.reasoning_parser = outside.names
        prompts = OutsidePrompts(process, model, folder, is_only_way=has_own_way)
        if has_own_way:
            await prompts.load()
        return prompts

    async def _folder(self, member: Member) -> Path:
        """With the model's files, for the process. Raises ConfigurationError and RpcError."""
        assert self._parser_process is not None, "somebody is to read them"
        files, _ = await self._files(member)
        return await self._parser_process.folder_of(text_hash(files), files)

    def _teachers_of(self, name: str) -> list[Member]:
        """Workers that the model is learnt from: those that take images, if only some do."""
        workers = self._workers_of(name)
        return [member for member in workers if member.attributes.get("media")] or workers

    def _workers_of(self, name: str) -> list[Member]:
        return [member for member in self._workers.values() if member.attributes.get("model", "") == name]


def _own_files(directory: Path, wanted_hash: str) -> TextFiles | None:
    """None where the directory has other files. A worker that announces no hash has the directory looked at all the
    same: its error says what is missing there."""
    try:
        files = read_text_files(directory)
    except ConfigurationError:
        if not wanted_hash:
            raise
        return None
    return files if text_hash(files) == wanted_hash or not wanted_hash else None


def read_defaults(announced: str) -> Mapping[str, Any]:
    """What a worker says of sampling; a name that this frontend does not know is left out, and logged. Raises
    ValueError for what is no JSON object."""
    defaults = msgspec.json.decode(announced, type=dict[str, Any]) if announced else {}
    unknown = defaults.keys() - parameters(SamplingParams).keys()
    if unknown:
        log.error("a worker announces sampling parameters that are unknown here", extra={"names": sorted(unknown)})
    return {name: value for name, value in defaults.items() if name not in unknown}


def _parsers(member: Member, text: ModelText) -> tuple[str, str]:
    """Of tools and reasoning. vLLM reads Harmony's channels whether it is asked to or not."""
    reasoning = HARMONY_PARSER if text.model_type == HARMONY_MODEL_TYPE else ""
    return member.attributes.get("tool_call_parser", ""), member.attributes.get("reasoning_parser", "") or reasoning


def _tasks(member: Member) -> tuple[str, ...]:
    return tuple(member.attributes.get("tasks", GENERATE).split(","))


def _facts(member: Member) -> Mapping[str, str]:
    return {name: member.attributes.get(name, "") for name in FACTS}
