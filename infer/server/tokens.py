"""POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from .context import ServerContext
from .errors import bad_request
from .json_route import JsonRoute
from .responses import DetokenizeResponse, TokenizeResponse, to_json
from .schema import DetokenizeBody, TokenizeBody


def make_router(context: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, tags=["tokens"])

    @router.post("/tokenize", response_model=TokenizeResponse)
    async def tokenize(body: TokenizeBody) -> Response:
        """Token ids of a text, or of a conversation as the chat template writes it."""
        context.check_model(body.model)
        return JSONResponse(to_json(await asyncio.to_thread(_tokenize, context, body)))

    @router.post("/detokenize", response_model=DetokenizeResponse)
    async def detokenize(body: DetokenizeBody) -> Response:
        """Text of token ids, special tokens included."""
        context.check_model(body.model)
        context.codec.check_ids(body.tokens, "tokens")
        text = await asyncio.to_thread(context.codec.decode, body.tokens)
        return JSONResponse(to_json(DetokenizeResponse(prompt=text)))

    return router


def _tokenize(context: ServerContext, body: TokenizeBody) -> TokenizeResponse:
    ids = _ids(context, body)
    texts = [context.codec.token_text(token) for token in ids] if body.return_token_strs else None
    length = context.limits.max_model_len
    return TokenizeResponse(count=len(ids), max_model_len=length, tokens=ids, token_strs=texts)


def _ids(context: ServerContext, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (not body.messages):
        raise bad_request("prompt: expected either prompt or messages", "prompt")
    if body.prompt is not None:
        return context.codec.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    return context.codec.encode_chat(
        body.messages or [],
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt is not False,
        template_kwargs=body.chat_template_kwargs,
    )
