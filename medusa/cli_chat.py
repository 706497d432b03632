"""`medusa chat`. Part of the composition root, as cli.py is."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .cli_options import (
    BaseOverride,
    Device,
    Dtype,
    DtypeOption,
    FrequencyPenalty,
    Heads,
    MaxNewTokens,
    MinP,
    PresencePenalty,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
    TrustRemoteCode,
    make_sampling,
    open_console,
)


def chat(
    heads: Heads,
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    max_new_tokens: MaxNewTokens = 1024,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends an answer; repeatable.")] = None,
    speculate: Annotated[bool, typer.Option(help="Draft with the heads, or decode a token at a time.")] = True,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    seed: Seed = None,
    base: BaseOverride = None,
    dtype: DtypeOption = Dtype.float32,
    device: Device = "cpu",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Chat on the terminal, drafted tokens in green. /reset, /save FILE, /exit; Ctrl-C stops an answer."""
    console = open_console()
    from .infer.chat import Chat, run_chat
    from .model import MedusaModel

    sampling = make_sampling(
        temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
    )
    model = MedusaModel.from_pretrained(
        heads, base=base, dtype=dtype.value, device=device, pack=True, trust_remote_code=trust_remote_code
    )
    if sys.stdin.isatty():
        import readline  # noqa: F401  # line editing and history
    prompt = "> " if sys.stdin.isatty() else ""
    run_chat(
        Chat(model, console, system, max_new_tokens, stop or (), sampling, speculate),
        lambda: input(prompt),
    )
