"""`medusa serve`. Part of the composition root, as cli.py is."""

from __future__ import annotations

import os
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from .cli_options import BaseOverride, Device, Dtype, DtypeOption, Heads, TrustRemoteCode, open_console

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "llguidance")


class LogFormat(str, Enum):
    text = "text"
    json = "json"


class ToolParser(str, Enum):
    auto = "auto"
    hermes = "hermes"
    llama3_json = "llama3_json"
    mistral = "mistral"


def serve(
    heads: Heads,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all of the machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="TCP port.")] = 8000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File with API keys, one a line; the variable MEDUSA_API_KEYS (commas) adds to it."),
    ] = None,
    model_name: Annotated[
        str | None, typer.Option(help="What clients call the model; default: the base model's own name.")
    ] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="Sequences decoded together.")] = 8,
    max_waiting: Annotated[int, typer.Option(min=0, help="Requests in the queue; more are answered 429.")] = 128,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Tokens of prompt and answer; default: the model's, at most 4096.")
    ] = None,
    prefill_chunk: Annotated[
        int, typer.Option(min=1, help="Prompt tokens a step, so that long prompts hold nobody up.")
    ] = 256,
    prefix_cache_mb: Annotated[int, typer.Option(min=0, help="Memory for prompts seen before, MiB; 0: none.")] = 256,
    request_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds until a request is given up (504).")] = 600.0,
    drain_timeout: Annotated[float, typer.Option(min=0, help="Seconds that requests may finish in at SIGTERM.")] = 30.0,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Size of a request, MiB; more is answered 413.")] = 4,
    max_choices: Annotated[int, typer.Option(min=1, help="Prompts times n in one request.")] = 64,
    tool_parser: Annotated[ToolParser, typer.Option(help="How the model writes tool calls.")] = ToolParser.auto,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Site whose pages may call this server; repeatable; default: none.")
    ] = None,
    playground: Annotated[bool, typer.Option(help="Serve the page at /.")] = True,
    log_format: Annotated[LogFormat, typer.Option(help="Of the lines on standard error.")] = LogFormat.text,
    base: BaseOverride = None,
    dtype: DtypeOption = Dtype.float32,
    device: Device = "cpu",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Serve an OpenAI-compatible API and a page to chat on. Needs the extra `serve`.

    Requests join and leave one batch at step boundaries; answers are the base model's own. SIGTERM lets running
    requests finish. docs/serving.md has every field, limit and metric.
    """
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise ValueError(f"serve: got no {missing[0]}, expected the extra; pip install 'medusa-decoding[serve]'")
    from .infer.server.auth import load_keys
    from .infer.server.request_log import configure_logging

    keys = load_keys(api_key_file, os.environ)
    configure_logging(log_format.value)
    open_console()
    from .infer.server.run import ServeOptions, serve
    from .model import MedusaModel

    options = ServeOptions(
        host=host,
        port=port,
        model_name=model_name,
        max_rows=max_rows,
        max_waiting=max_waiting,
        max_model_len=max_model_len,
        prefill_chunk=prefill_chunk,
        prefix_cache_bytes=prefix_cache_mb << 20,
        request_timeout_s=request_timeout,
        drain_timeout_s=drain_timeout,
        max_body_bytes=max_body_mb << 20,
        max_choices=max_choices,
        tool_format=None if tool_parser is ToolParser.auto else tool_parser.value,
        cors_origins=cors_origin or (),
        playground=playground,
    )

    def load() -> MedusaModel:
        return MedusaModel.from_pretrained(
            heads, base=base, dtype=dtype.value, device=device, pack=True, trust_remote_code=trust_remote_code
        )

    raise typer.Exit(serve(load, options, keys))
