"""The application: routes, errors, the page, and the gate around them."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from medusa import __version__

from . import chat, completions, info, playground_page, tokens
from .auth import ApiKeys
from .context import ServerContext
from .errors import add_handlers
from .gate import Gate
from .responses import ErrorResponse

ERROR_STATUSES = (400, 401, 404, 413, 429, 503, 504)


def create_app(
    context: ServerContext, keys: ApiKeys, *, cors_origins: Sequence[str] = (), playground: bool = True
) -> FastAPI:
    """cors_origins: sites whose pages may call this server from a browser; none by default."""
    app = FastAPI(
        title="medusa",
        version=__version__,
        description="OpenAI-compatible server over lossless tree decoding.",
        docs_url=None,  # its page is fetched from elsewhere
        redoc_url=None,
        responses={status: {"model": ErrorResponse} for status in ERROR_STATUSES},
    )
    add_handlers(app)
    for module in (chat, completions, tokens, info):
        app.include_router(module.make_router(context))
    if playground:
        app.include_router(playground_page.make_router())
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
            expose_headers=["X-Request-Id"],
        )
    app.add_middleware(Gate, keys=keys, limits=context.limits, metrics=context.metrics)
    return app
