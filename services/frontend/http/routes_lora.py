"""Loading and unloading of LoRA adapters, for operators: POST /v1/load_lora_adapter and /v1/unload_lora_adapter, and
in SageMaker's words POST /adapters and DELETE /adapters/NAME."""

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from mesh.errors import PenstockError
from services.frontend.errors import ApiError, not_an_operator
from services.frontend.http.body import decode_leniently, timely_body
from services.frontend.http.exchange import without_effect_header
from services.frontend.http.openapi import text_docs
from services.frontend.requests.adapter_loader import AdapterLoader
from services.frontend.requests.adapter_schema import LoadAdapterBody, RegisterAdapterBody, UnloadAdapterBody
from services.frontend.requests.service import FrontendService

VLLM_VARIABLE: Final = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
KNOWN_WITHIN_S: Final = 3.0
"""How long an answer waits for this frontend to hear from the store what was written there."""
ALIAS_HEADER: Final = "x-amzn-sagemaker-adapter-alias"
"""SageMaker's own name of an adapter, which its answer tells."""
_SAGEMAKERS_NAMES: Final = {"lora_name": "name", "lora_path": "src"}


def allows_updates(option: bool, environment: Mapping[str, str]) -> bool:
    """Whether adapters may be loaded and unloaded over HTTP: by the frontend's option, or by vLLM's variable."""
    return option or environment.get(VLLM_VARIABLE, "").strip().lower() in ("1", "true")


def lora_routes(frontend: FrontendService, loader: AdapterLoader) -> APIRouter:
    """Loading and unloading of LoRA adapters."""
    router = APIRouter(tags=["LoRA adapters"])
    is_allowed = allows_updates(frontend.settings.allow_runtime_lora_updating, os.environ)

    @router.post("/v1/load_lora_adapter", **text_docs("That it is loaded", "LoadAdapterBody"))
    async def load_lora_adapter(request: Request) -> Response:
        """Load an adapter into all workers of its base model, and announce it as a model."""
        who = await _check_operator(frontend, request, is_allowed=is_allowed)
        body, unknown = decode_leniently(await timely_body(frontend, request), LoadAdapterBody)
        refused = await _load(frontend, loader, who, body)
        return _said(f"Success: LoRA adapter '{body.lora_name}' added successfully.{refused}", unknown)

    @router.post("/v1/unload_lora_adapter", **text_docs("That it is gone", "UnloadAdapterBody"))
    async def unload_lora_adapter(request: Request) -> Response:
        """Announce an adapter no more; what it answers goes on to its end."""
        who = await _check_operator(frontend, request, is_allowed=is_allowed)
        body, unknown = decode_leniently(await timely_body(frontend, request), UnloadAdapterBody)
        await _unload(frontend, loader, who, body.lora_name)
        return _said(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", unknown)

    @router.post("/adapters", **text_docs("That it is loaded", "RegisterAdapterBody"))
    async def register_adapter(request: Request) -> Response:
        """Load an adapter, as SageMaker asks for it."""
        who = await _check_operator(frontend, request, is_allowed=is_allowed)
        body, unknown = decode_leniently(await timely_body(frontend, request), RegisterAdapterBody)
        try:
            refused = await _load(frontend, loader, who, LoadAdapterBody(body.name, body.src))
        except ApiError as error:
            error.param = _SAGEMAKERS_NAMES.get(error.param or "", error.param)
            raise
        name = request.headers.get(ALIAS_HEADER) or body.name
        return _said(f"Adapter {name} registered{refused and '.' + refused}", [*unknown, *body.without_effect()])

    @router.delete("/adapters/{adapter_name}", **text_docs("That it is gone"))
    async def unregister_adapter(request: Request) -> Response:
        """Unload an adapter, as SageMaker asks for it."""
        who = await _check_operator(frontend, request, is_allowed=is_allowed)
        name = request.path_params["adapter_name"]
        await _unload(frontend, loader, who, name)
        return _said(f"Adapter {request.headers.get(ALIAS_HEADER) or name} unregistered")

    return router


async def _load(frontend: FrontendService, loader: AdapterLoader, who: str, body: LoadAdapterBody) -> str:
    """What the workers said that could not load it. Raises ApiError."""
    with _ordered(frontend, who, "lora load", body.lora_name):
        loaded = await loader.load(
            body.lora_name,
            body.lora_path,
            body.base_model_name or "",
            in_place=body.load_inplace,
            is_3d_lora_weight=body.is_3d_lora_weight,
        )
    await _heard(frontend, body.lora_name, loaded.digest)
    return "".join(f" {refusal}." for refusal in loaded.refusals)


async def _unload(frontend: FrontendService, loader: AdapterLoader, who: str, name: str) -> None:
    """Raises ApiError."""
    with _ordered(frontend, who, "lora unload", name):
        await loader.unload(name)
    await _heard(frontend, name, "")


def _said(text: str, without_effect: Sequence[str] = ()) -> Response:
    return PlainTextResponse(text, headers=without_effect_header(without_effect))


async def _check_operator(frontend: FrontendService, request: Request, *, is_allowed: bool) -> str:
    """Who asks. Whoever loads an adapter has every worker read files, and decides what a model's name stands for.
    Raises ApiError: 401, 403, 404 where it is not allowed at all."""
    key = await frontend.authenticate(request.headers.get("authorization"))
    if not is_allowed:
        raise ApiError(
            404,
            "Adapters cannot be loaded over HTTP here: start the frontend with --allow-runtime-lora-updating (or "
            f"{VLLM_VARIABLE}=true), or use `penstock lora`.",
        )
    if key is not None and not key.is_operator:
        raise not_an_operator(key.name)
    return "without a key" if key is None else f"key {key.name}"


@contextmanager
def _ordered(frontend: FrontendService, who: str, order: str, adapter: str) -> Iterator[None]:
    """The order that is carried out inside stands in the audit log with its outcome."""
    outcome = "cancelled by the caller"
    try:
        yield
        outcome = "done"
    except (ApiError, PenstockError) as error:
        outcome = str(error)
        raise
    finally:
        frontend.ordered(who, order, {"name": adapter}, outcome)


async def _heard(frontend: FrontendService, name: str, digest: str) -> None:
    """Who loads an adapter asks for it next, of this frontend."""
    adapters = frontend.catalogue.adapters

    def is_heard() -> bool:
        known = adapters.find(name)
        return ("" if known is None else known.adapter.digest) == digest

    try:
        async with asyncio.timeout(KNOWN_WITHIN_S):
            await adapters.until(is_heard)
    except TimeoutError:
        return  # it is stored all the same
