"""What an attached server is: found out by asking it."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Final

from engine_worker.engines.attached.client import ServerClient, ServerLost, explained
from engine_worker.engines.attached.settings import AttachedSettings
from engine_worker.engines.attached.wire import (
    Abilities,
    ServedModel,
    ServerMetrics,
    StreamError,
    choose_model,
    parse_metrics,
    probe_body,
    served_models,
    tells_tokens,
)
from engine_worker.engines.interface import EngineLimits, ModelIdentity
from engine_worker.engines.vllm.connector.endpoint import TOKEN_VARIABLE
from mesh.errors import ConfigurationError, EngineFailed
from mesh.runtime import Clock

log = logging.getLogger(__name__)

ATTACH_KEY_VARIABLE: Final = "PENSTOCK_ATTACH_API_KEY"

_PAUSE_S = 1.0
_PROBE_S = 30.0
"""A server's first request compiles and allocates."""
_TEXT = "a"
_FALLBACK_BLOCK_TOKENS = 16
_FALLBACK_MODEL_LEN = 4096


async def wait_for_model(client: ServerClient, settings: AttachedSettings, clock: Clock) -> ServedModel:
    """The model to serve, as soon as the server answers.

    Raises `EngineFailed` if it does not within `start_s`, or wants a key, and `ConfigurationError` if it has no such
    model.
    """
    until_s = clock.now_s() + settings.start_s
    is_said = False
    while True:
        try:
            return choose_model(served_models(await client.get("/v1/models")), settings.served_model)
        except StreamError as error:
            if error.status < 500:
                raise explained(error, client.url) from error
            reason = str(error)
        except ServerLost as error:
            reason = str(error)
        if clock.now_s() >= until_s:
            raise EngineFailed(f"{client.url} was not serving within {settings.start_s:g} s: {reason}")
        if not is_said:
            is_said = True
            log.warning("the attached server is waited for", extra={"url": client.url, "reason": reason})
        await clock.sleep(_PAUSE_S)


async def identify(settings: AttachedSettings, clock: Clock) -> ModelIdentity:
    """Name and source of the model that the server has. Raises as `wait_for_model`, and `ConfigurationError` where it
    does not say where its tokenizer is."""
    client = ServerClient(settings.url, settings.api_key, settings.answer_s)
    try:
        model = await wait_for_model(client, settings, clock)
    finally:
        await client.close()
    return ModelIdentity(public_name(model), model.root)


def public_name(model: ServedModel) -> str:
    """What clients of a mesh call it: vLLM calls a model by its whole path where it is given no other name."""
    return Path(model.name).name if Path(model.name).is_absolute() else model.name


async def find_abilities(client: ServerClient, model: ServedModel) -> Abilities:
    """What it takes and tells, by a request of one token. Raises `EngineFailed` if it answers nothing."""
    try:
        answer = await client.post("/v1/completions", probe_body(model.name, [0]), _PROBE_S)
        return Abilities(model.is_vllm, takes_tokens=True, tells_tokens=tells_tokens(answer))
    except StreamError as error:
        if not error.is_request and error.status != 500:
            raise explained(error, client.url) from error
        refused = error
    try:
        await client.post("/v1/completions", probe_body(model.name, _TEXT), _PROBE_S)
    except StreamError as error:
        raise explained(error, client.url) from error
    log.warning("the attached server takes no token ids: prompts go as text", extra={"reason": str(refused)})
    return Abilities(model.is_vllm, takes_tokens=False, tells_tokens=False)


class MetricsReader:
    """Reads a server's metrics, for each of its engine cores: what one has asked for within `fresh_s` is everybody's,
    since the text is that of all and long."""

    def __init__(self, client: ServerClient, clock: Clock, fresh_s: float = 0.0) -> None:
        self._client = client
        self._clock = clock
        self._fresh_s = fresh_s
        self._asked_s = -inf
        self._latest_text = ""
        self._answer: asyncio.Task[str | ServerLost | None] | None = None

    @property
    def latest_text(self) -> str:
        """What the server said last; empty before, and where it has no metrics or is away."""
        return self._latest_text

    async def read(self, core: int | None = None) -> ServerMetrics | None:
        """Those of a core, or of all; None for a server that has none. Raises `ServerLost`."""
        now_s = self._clock.now_s()
        if self._answer is None or (self._answer.done() and now_s - self._asked_s >= self._fresh_s):
            self._asked_s = now_s
            self._answer = asyncio.create_task(self._ask(), name="metrics")
        asked_s = self._asked_s
        text = await asyncio.shield(self._answer)
        self._latest_text = text if isinstance(text, str) else ""
        if isinstance(text, ServerLost):
            raise text
        return None if text is None else replace(parse_metrics(text, core), asked_s=asked_s)

    async def _ask(self) -> str | ServerLost | None:
        try:
            return (await self._client.get("/metrics")).decode("utf-8", "replace")
        except ServerLost as lost:
            return lost
        except StreamError:
            return None


def limits_of(
    settings: AttachedSettings, model: ServedModel, metrics: ServerMetrics | None, abilities: Abilities
) -> EngineLimits:
    """What each of its engine cores holds, as far as it says; what the settings say goes first, and a guess that is
    logged comes last. Raises `ConfigurationError` where they say that it has other cores than it has."""
    known, cores = metrics or ServerMetrics(), settings.data_parallel_size
    # Without cores of their own, the server may have another one serve what was moved to the first one's connector.
    if known.cores not in (0, cores) and (cores > 1 or settings.control):
        raise ConfigurationError(
            f"the server has {known.cores} engine cores: attach it with --engine-arg data_parallel_size={known.cores}"
        )
    block_tokens = settings.block_size or known.block_size or _FALLBACK_BLOCK_TOKENS
    max_model_len = settings.max_model_len or model.max_model_len or _FALLBACK_MODEL_LEN
    kv_blocks = (settings.kv_blocks or known.kv_blocks) // cores
    guessed = {
        "max_model_len": not (settings.max_model_len or model.max_model_len),
        "block_size": not (settings.block_size or known.block_size),
        "kv_blocks": not kv_blocks,
    }
    if any(guessed.values()):
        names = ", ".join(name for name, is_guess in guessed.items() if is_guess)
        log.warning("the attached server does not say everything; give it as --engine-arg", extra={"guessed": names})
    return EngineLimits(
        block_tokens=block_tokens,
        kv_blocks=kv_blocks or settings.max_num_seqs * max_model_len // block_tokens,
        max_model_len_tokens=max_model_len,
        max_batch_requests=settings.max_num_seqs,
        max_step_tokens=settings.max_num_batched_tokens,
        label=abilities.label,
        http_url=settings.gateway_url or settings.url,
        tokenizer_mode=settings.tokenizer_mode,
    )


def with_secrets(settings: AttachedSettings, environ: Mapping[str, str]) -> AttachedSettings:
    """With the key and the token of the environment where none are given. Raises `ConfigurationError` without a URL."""
    if not settings.url:
        raise ConfigurationError("an attached engine needs --engine-arg url=http://HOST:PORT")
    return replace(
        settings,
        api_key=settings.api_key or environ.get(ATTACH_KEY_VARIABLE, ""),
        control_token=settings.control_token or environ.get(TOKEN_VARIABLE, ""),
    )
