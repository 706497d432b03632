"""The server's process: model, engine, application, uvicorn; and how it ends when it is asked to."""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from types import FrameType

import uvicorn
from fastapi import FastAPI

from medusa.model import MedusaModel

from ..engine import Engine
from ..prefix_cache import PREFIX_CACHE_BYTES
from ..request import Request
from ..service import EngineService
from ..short_thread import in_short_thread
from .app import create_app
from .auth import ApiKeys
from .context import ServerContext
from .grammar import GrammarCompiler
from .limits import Limits
from .metrics import Metrics
from .request_log import log
from .text_codec import TextCodec
from .tools import FORMATS, detect_format

DEFAULT_MAX_MODEL_LEN = 4096  # the cache is made for so many tokens a row, at once
KEEP_ALIVE_S = 75  # idle connections; longer than clients and proxies keep theirs, so that these end them
LAST_RESPONSES_S = 5  # for responses that are complete to reach their clients


@dataclass(frozen=True)
class ServeOptions:
    """model_name: as clients call it; None for the base model's own. max_rows: sequences decoded together. max_waiting:
    requests in the queue. max_model_len: None for the model's own, at most 4096. tool_format: a name of
    `tools.FORMATS`, or None to tell by the tokenizer. Times in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str | None = None
    max_rows: int = 8
    max_waiting: int = 128
    max_model_len: int | None = None
    prefill_chunk: int = 256
    prefix_cache_bytes: int = PREFIX_CACHE_BYTES
    request_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0
    max_body_bytes: int = 4 << 20
    max_choices: int = 64
    tool_format: str | None = None
    cors_origins: Sequence[str] = ()
    playground: bool = True


def make_context(model: MedusaModel, options: ServeOptions) -> ServerContext:
    """Everything but the network; the engine's thread is started. Raises ValueError for a length beyond the model's."""
    base = model.base
    max_model_len = options.max_model_len or min(base.max_positions, DEFAULT_MAX_MODEL_LEN)
    if not 2 <= max_model_len <= base.max_positions:
        raise ValueError(
            f"--max-model-len: got {max_model_len}, expected 2 to {base.max_positions}, the context of the base model"
        )
    name = options.model_name or base.name.rstrip("/").rsplit("/", 1)[-1]
    metrics = Metrics(name)
    engine = Engine(
        base,
        model.drafter(),
        max_rows=options.max_rows,
        capacity=max_model_len,
        prefill_chunk=options.prefill_chunk,
        prefix_cache_bytes=options.prefix_cache_bytes,
    )
    service = EngineService(engine, max_waiting=options.max_waiting, listener=metrics)
    codec = TextCodec(base.tokenizer, base.vocab_size)
    context = ServerContext(
        service=service,
        base_model=base,
        codec=codec,
        grammar=GrammarCompiler(codec.tokenizer, base.vocab_size, base.eos_token_ids),
        tool_format=FORMATS[options.tool_format] if options.tool_format else detect_format(codec),
        limits=Limits(
            max_model_len,
            max_body_bytes=options.max_body_bytes,
            max_choices=options.max_choices,
            request_timeout_s=options.request_timeout_s,
        ),
        metrics=metrics,
        model_id=name,
    )
    _warm_up(engine)
    service.start()
    return context


def _warm_up(engine: Engine) -> None:
    """The first forward makes the cache, gigabytes that are filled with zeros: before a client waits for it."""
    for _ in engine.run([Request([0], 2, frozenset(), engine.base_model.tokenizer)]):
        pass


class DrainingServer(uvicorn.Server):
    """The first SIGTERM or SIGINT: no more requests are taken (503), those that run may finish within the drain time,
    the rest are told. The second: those that run are told at once. Then the process ends with status 0. A dead engine
    ends it with status 1."""

    def __init__(self, config: uvicorn.Config, context: ServerContext, drain_timeout_s: float) -> None:
        super().__init__(config)
        self._context, self._drain_timeout_s = context, drain_timeout_s
        self._num_signals = 0
        self._drains: list[asyncio.Task[None]] = []

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._num_signals += 1

    def stop(self) -> None:
        """As the first signal does."""
        self._num_signals = max(1, self._num_signals)

    async def on_tick(self, counter: int) -> bool:
        if self._num_signals > len(self._drains):
            timeout_s = 0 if self._drains else self._drain_timeout_s
            self._drains.append(asyncio.create_task(self._drain(timeout_s)))
        if not self._context.service.alive and not self.should_exit:
            log("the engine has died; shutting down", logging.CRITICAL)
            self.should_exit = True
        return await super().on_tick(counter)

    async def _drain(self, timeout_s: float) -> None:
        self._context.is_draining = True
        log("draining", timeout_s=timeout_s)
        complete = await asyncio.to_thread(self._context.service.drain, timeout_s)
        log("drained", all_finished=complete)
        self.should_exit = True


def make_server(context: ServerContext, app: FastAPI, options: ServeOptions) -> DrainingServer:
    config = uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_RESPONSES_S,
    )
    return DrainingServer(config, context, options.drain_timeout_s)


def serve(load: Callable[[], MedusaModel], options: ServeOptions, keys: ApiKeys) -> int:
    """Serve what `load` gives until a signal; returns the exit status."""
    if not keys and not _is_loopback(options.host):
        warnings.warn(
            f"listening on {options.host} without an API key: whoever reaches this port can use the model; "
            "give --api-key-file",
            stacklevel=2,
        )
    context = in_short_thread(lambda: make_context(load(), options))
    app = create_app(context, keys, cors_origins=options.cors_origins, playground=options.playground)
    server = make_server(context, app, options)
    log(
        "serving",
        url=f"http://{options.host}:{options.port}",
        model=context.model_id,
        max_model_len=context.limits.max_model_len,
        max_rows=options.max_rows,
        api_keys=bool(keys),
    )
    server.run()
    return 0 if context.service.alive and server.started else 1


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
