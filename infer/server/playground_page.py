"""GET / : a page to chat on, made of three files that come with the package. Nothing is fetched from elsewhere."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_FILES = {
    "/": ("index.html", "text/html"),
    "/playground/playground.css": ("playground.css", "text/css"),
    "/playground/playground.js": ("playground.js", "text/javascript"),
}


def make_router() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    for path, (name, media_type) in _FILES.items():
        router.add_api_route(path, _page(name, media_type), methods=["GET"])
    return router


def _page(name: str, media_type: str):  # type: ignore[no-untyped-def]
    content = files("medusa.infer.server").joinpath("playground", name).read_bytes()
    headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}

    async def page() -> Response:
        return Response(content, media_type=media_type, headers=headers)

    return page
