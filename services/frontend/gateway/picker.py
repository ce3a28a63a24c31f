"""Which endpoint a request goes to: its prompt is read as the frontend reads it, and the schedulers place it."""

import logging
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from controlplane.model.prefix_hash import block_hashes, root_hash
from controlplane.protocols.recovery import (
    Begin,
    Choose,
    Chosen,
    Event,
    GivenUp,
    GiveUp,
    NoneChosen,
    NotSubmitted,
    RecoveryLimits,
    RecoveryManager,
    Run,
    Submit,
    Submitted,
    Wait,
    Woken,
)
from mesh.errors import NoInstance, UnknownModel
from mesh.runtime import Threads
from penstock.v1 import scheduler_pb2
from services.frontend.errors import ApiError, bad_request, stopped, unavailable
from services.frontend.gateway.endpoints import Endpoint, Endpoints
from services.frontend.gateway.metrics import GatewayMetrics
from services.frontend.gateway.settings import GatewaySettings
from services.frontend.placement.client import Placement, PlacementClient
from services.frontend.placement.waiting_room import WaitingRoom
from services.frontend.requests.models import ModelCatalogue, ServedModel
from services.frontend.requests.plan import COMPLETION_MAX_TOKENS, prompt_ids
from services.frontend.requests.schema import ChatCompletionRequest, CompletionRequest

log = logging.getLogger(__name__)

_KINDS: Final[dict[str, type[ChatCompletionRequest] | type[CompletionRequest]]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
}
"""Of which the prompt is read. Other requests that name a model are placed by load alone."""
_BYTES_PER_TOKEN: Final = 4
"""Of a prompt that cannot be read: English text in JSON."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a placement is decided by."""

    hashes: list[int]
    tokens: int
    max_tokens: int
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Pick:
    """Where a request goes, until `Picker.ended`."""

    request_id: str
    model: str
    instance_id: str
    policy: str
    endpoints: tuple[str, ...]
    """The instance's own first."""


class Picker:
    """Picks for all streams of a gateway."""

    def __init__(
        self,
        settings: GatewaySettings,
        catalogue: ModelCatalogue,
        endpoints: Endpoints,
        placement: PlacementClient,
        metrics: GatewayMetrics,
        threads: Threads,
        clock: Callable[[], float],
    ) -> None:
        self.catalogue = catalogue
        self.endpoints = endpoints
        self.placement = placement
        self.room = WaitingRoom(settings.max_waiting_requests, metrics)
        self._settings = settings
        self._limits = RecoveryLimits(wait_s=settings.instance_wait_s)
        self._metrics = metrics
        self._threads = threads
        self._clock = clock

    async def pick(self, request_id: str, path: str, body: bytes, subset: Collection[str] | None) -> Pick | None:
        """None where the request names no model: the gateway is to choose by itself. `subset`: the addresses that may
        be chosen; None: any. Raises ApiError: 400, 404, 429, 503. Tell `ended` once for each pick."""
        fields = _fields(path, body)
        if fields is None:
            self._metrics.passed.inc()
            return None
        began_s = self._clock()
        model = await self.catalogue.asked_for(_model_name(fields))
        prompt = await self._prompt(path, fields, len(body), model)
        placement = await self._place(request_id, model, prompt, subset)
        self._metrics.pick.observe(self._clock() - began_s)
        self.endpoints.requests[placement.instance_id] += 1
        addresses = self._addresses(placement, model.engine_model, subset)
        return Pick(request_id, model.engine_model, placement.instance_id, placement.policy, addresses)

    def ended(self, pick: Pick, ok: bool, reason: str) -> None:
        """The request is at its endpoint no more, or has never come there."""
        requests = self.endpoints.requests
        requests[pick.instance_id] -= 1
        if not requests[pick.instance_id]:
            del requests[pick.instance_id]
        self._metrics.requests.labels(pick.model, reason).inc()
        self.placement.ended(pick.request_id, ok, reason)

    async def _prompt(self, path: str, fields: dict[str, Any], body_bytes: int, model: ServedModel) -> Prompt:
        """What cannot be read is no reason to refuse a request that the server may understand."""
        kind = _KINDS.get(path)
        if kind is None:
            return Prompt([], _estimated(body_bytes), 0)
        try:
            known = {name: value for name, value in fields.items() if name in kind.__struct_fields__}
            request = msgspec.convert(known, kind)
            prompts = await prompt_ids(request, model, self._threads)
        except (msgspec.ValidationError, ApiError, RecursionError) as error:
            self._metrics.unread.labels(model.engine_model).inc()
            log.debug("a prompt is not read", extra={"model": model.name, "path": path, "error": str(error)})
            return Prompt([], _estimated(body_bytes), 0)
        asked = request.max_tokens
        if isinstance(request, ChatCompletionRequest):
            asked = request.max_completion_tokens or asked
        tokens = sum(map(len, prompts))
        left = max(1, model.max_model_len_tokens - len(prompts[0]))
        default = COMPLETION_MAX_TOKENS if isinstance(request, CompletionRequest) else left
        digest = "" if model.adapter is None else model.adapter.digest
        # One request goes to one server, however many prompts it brings: the first one speaks for all.
        hashes = block_hashes(prompts[0], model.block_tokens, root_hash(request.cache_salt or "", digest))
        return Prompt(hashes, tokens, min(default if asked is None else asked, left), request.priority or 0)

    async def _place(
        self, request_id: str, model: ServedModel, prompt: Prompt, subset: Collection[str] | None
    ) -> Placement:
        """On an endpoint, as soon as there is one. The manager is the frontend's, too. Raises ApiError."""
        manager = RecoveryManager(request_id, self._limits)
        instruction = manager.handle(Begin(self._settings.instance_wait_s), self._clock())
        placement: Placement | None = None
        try:
            with ExitStack() as waiting:
                waits = False
                while not isinstance(instruction, Run):
                    seen = self.endpoints.news
                    event: Event
                    match instruction:
                        case Choose(excluded, may_overrule):
                            try:
                                placement = await self._choose(
                                    request_id, model, prompt, subset, excluded, may_overrule=may_overrule
                                )
                                event = Chosen(placement.instance_id)
                            except (NoInstance, UnknownModel) as error:
                                event = NoneChosen(str(error))
                        case Submit(instance_id):
                            is_there = self.endpoints.find(instance_id) is not None
                            event = Submitted(instance_id) if is_there else NotSubmitted(instance_id)
                        case Wait(seconds, because, reason):
                            if not waits:
                                waiting.enter_context(self.room.entered(model.name, _refusal(because, reason)))
                                waits = True
                            if self.room.is_closed:
                                raise stopped()
                            event = Woken(has_news=await self.endpoints.wait_for_news(seen, seconds))
                        case GiveUp(because, reason):
                            raise _refusal(because, reason)
                        case _:
                            raise AssertionError(f"a new request is not told to {instruction}")
                    instruction = manager.handle(event, self._clock())
        except BaseException:
            self.placement.ended(request_id, False, "aborted")
            raise
        assert placement is not None, "an instance was chosen"
        return placement

    async def _choose(
        self,
        request_id: str,
        model: ServedModel,
        prompt: Prompt,
        subset: Collection[str] | None,
        excluded: tuple[str, ...],
        *,
        may_overrule: bool,
    ) -> Placement:
        """Raises NoInstance and UnknownModel."""
        name = model.engine_model
        barred = {each.instance_id for each in self.endpoints.of(name)}
        barred -= {each.instance_id for each in self.endpoints.of(name, subset)}
        request = scheduler_pb2.PlaceRequest(
            request_id=request_id,
            model=name,
            prompt_tokens=prompt.tokens,
            block_hashes=prompt.hashes,
            priority=prompt.priority,
            max_tokens=prompt.max_tokens,
            excluded_instance_ids=sorted(barred.union(excluded)),
            adapter_digest="" if model.adapter is None else model.adapter.digest,
        )
        if subset is not None and not self.endpoints.of(name, subset):
            raise NoInstance(f"none of the {len(subset)} endpoints that the gateway allows serves {name}")
        try:
            return await self.placement.place(request)
        except (NoInstance, UnknownModel):
            if (may_overrule or self.placement.is_overruled(name)) and self.endpoints.of(name, subset):
                return self.placement.overrule(request)
            raise

    def _addresses(self, placement: Placement, model: str, subset: Collection[str] | None) -> tuple[str, ...]:
        """The one picked, then others, those with the fewest requests first."""
        chosen = self.endpoints.find(placement.instance_id)
        assert chosen is not None, "it was looked up when it was submitted"
        others = [each for each in self.endpoints.of(model, subset) if each.address != chosen.address]
        others.sort(key=self._load)
        return (chosen.address, *(each.address for each in others[: self._settings.max_fallbacks]))

    def _load(self, endpoint: Endpoint) -> int:
        return self.endpoints.requests[endpoint.instance_id]


def _fields(path: str, body: bytes) -> dict[str, Any] | None:
    """Of a body; None for one that names no model and may be anything. Raises ApiError (400)."""
    must_be_read = path in _KINDS
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if must_be_read:
            raise bad_request(f"The body is not valid JSON: {error}.") from error
        return None
    if isinstance(fields, dict) and (must_be_read or "model" in fields):
        return fields
    if must_be_read:
        raise bad_request("The body must be a JSON object.")
    return None


def _model_name(fields: dict[str, Any]) -> str:
    name = fields.get("model", "")
    if not isinstance(name, str):
        raise bad_request("Invalid `model`: a text is expected.", "model", "invalid_value")
    return name


def _estimated(body_bytes: int) -> int:
    return max(1, body_bytes // _BYTES_PER_TOKEN)


def _refusal(because: GivenUp, reason: str) -> ApiError:
    code = "no_instance" if because is GivenUp.NO_INSTANCE else "service_unavailable"
    return unavailable(f"No endpoint can take this request now: {reason}.", code)
