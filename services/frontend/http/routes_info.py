"""GET /v1/models, /health, /ping, /version and /metrics"""

from importlib.metadata import version

import msgspec
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from controlplane.model.pooling import GENERATE
from services.frontend.answers.schema import Model, ModelFacts, ModelList
from services.frontend.answers.sse import encode
from services.frontend.cascade.hints import terms_in_force
from services.frontend.cascade.service import CascadeService
from services.frontend.errors import model_not_found, unavailable
from services.frontend.http.openapi import answer_docs
from services.frontend.mesh_metrics import MeshMetrics
from services.frontend.requests.models import ServedModel
from services.frontend.requests.service import check_model


def info_routes(service: CascadeService) -> APIRouter:
    """The endpoints that generate nothing. /health, /ping and /version need no key."""
    frontend = service.frontend
    router = APIRouter(tags=["information"])

    @router.get("/v1/models", **answer_docs("ModelList", "The models that have a worker now", 401))
    async def list_models(request: Request) -> Response:
        """Models and cascades that can be asked for now."""
        key = await frontend.authenticate(request.headers.get("authorization"))
        return _json(encode(ModelList([each for each in _models(service) if key is None or key.may_ask(each.id)])))

    @router.get("/v1/models/{model:path}", **answer_docs("Model", "The model", 401, 404))
    async def retrieve_model(model: str, request: Request) -> Response:
        """One model, by its id; 404 if no worker serves it now. A slash without an id leads to the list."""
        if not model:
            return Response(status_code=307, headers={"location": "/v1/models"})
        check_model(await frontend.authenticate(request.headers.get("authorization")), model)
        for served in _models(service):
            if served.id == model:
                return _json(encode(served))
        raise model_not_found(model)

    @router.get("/health")
    async def health() -> Response:
        """200 while requests can be served, 503 while no worker is connected."""
        if not any(link.is_connected for link in frontend.pool.links()):
            raise unavailable("No worker is connected.", "no_instance")
        return _json(b'{"status":"ok"}')

    @router.get("/ping")
    @router.post("/ping")
    async def ping() -> Response:
        """As /health: the name that SageMaker asks for."""
        return await health()

    @router.get("/load")
    async def load() -> Response:
        """Requests that this frontend is answering now, as vLLM's servers say it."""
        return _json(encode({"server_load": frontend.gate.queue.running}))

    @router.get("/version")
    async def show_version() -> Response:
        """The version of Penstock; each instance knows that of its engine."""
        return _json(encode({"version": version("penstock")}))

    return router


def metrics_routes(metrics: MeshMetrics) -> APIRouter:
    """/metrics, which needs no key."""
    router = APIRouter(tags=["information"])

    @router.get("/metrics")
    async def show_metrics() -> Response:
        """Prometheus metrics of this frontend, and of the whole mesh under vLLM's names."""
        return Response(await metrics.page(), headers={"content-type": CONTENT_TYPE_LATEST})

    return router


def _models(service: CascadeService) -> list[Model]:
    """The models, and the cascades of which all tiers are among them that their thresholds let requests reach."""
    served = {model.name: model for model in service.frontend.catalogue.served()}
    models = [_model(model) for model in served.values()]
    for name, record in sorted(service.cascades.records.items()):
        reached = {record.tiers[tier] for tier in terms_in_force(record).reached}
        tiers = [served[tier] for tier in record.tiers if tier in served]
        if reached <= served.keys():
            context_tokens = max(tier.max_model_len_tokens for tier in tiers)
            vocabulary = ModelFacts(min(tier.text.vocabulary_size for tier in tiers), tiers=list(record.tiers))
            models.append(Model(name, max(tier.created_unix_s for tier in tiers), context_tokens, vocabulary))
    return models


def _model(model: ServedModel) -> Model:
    defaults = dict(model.sampling_defaults) or msgspec.UNSET
    tasks = msgspec.UNSET if GENERATE in model.tasks else list(model.tasks)
    facts = ModelFacts(model.text.vocabulary_size, tasks=tasks, sampling_defaults=defaults)
    listed = Model(model.name, model.created_unix_s, model.max_model_len_tokens, facts)
    if model.adapter is not None:
        listed.root, listed.parent = model.adapter.path, model.base_model
    return listed


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
