"""GET /v1/models, /health, /version, /metrics."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from medusa import __version__

from .context import ServerContext
from .errors import ApiError, draining
from .responses import ModelCard, ModelList, Version, to_json


def make_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["server"])

    def card() -> ModelCard:
        length = context.limits.max_model_len
        return ModelCard(id=context.model_id, created=context.created, root=context.model_id, max_model_len=length)

    @router.get("/v1/models", response_model=ModelList)
    async def list_models() -> Response:
        """The one model that is served."""
        return JSONResponse(to_json(ModelList(data=[card()])))

    @router.get("/v1/models/{model:path}", response_model=ModelCard)
    async def show_model(model: str) -> Response:
        context.check_model(model)
        return JSONResponse(to_json(card()))

    @router.get("/health")
    async def health() -> Response:
        """200 with an empty body; 503 once the engine has died or the server is shutting down."""
        if not context.service.alive:
            raise ApiError(503, "the engine has died")
        if context.is_draining:
            raise draining()
        return Response()

    @router.get("/version", response_model=Version)
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text format."""
        content, media_type = context.metrics.expose(context.service.load())
        return Response(content, media_type=media_type)

    return router
