"""`medusa export` and `medusa import`. Part of the composition root, as cli.py is."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from .cli_options import BaseOverride, Dtype, TrustRemoteCode, open_console


class EngineName(str, Enum):
    vllm = "vllm"
    tgi = "tgi"
    trtllm = "trtllm"
    mlc = "mlc"
    medusa_v1 = "medusa-v1"
    medusa_v2 = "medusa-v2"
    hf = "hf"


def export_command(
    heads: Annotated[str, typer.Option(help="Heads directory, or a Hub name.", show_default=False)],
    to: Annotated[
        EngineName,
        typer.Option(
            help="Whose files: vLLM (0.18 to 0.32), TGI, TensorRT-LLM (to 1.2), MLC-LLM, the original code's whole "
            "models (medusa-v1) or bare blocks (medusa-v2), or Transformers with this package (hf).",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Directory to write, new or empty.", show_default=False)],
    base: BaseOverride = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of the tensors written; default: as the heads are saved.")
    ] = None,
    push_to_hub: Annotated[
        str | None,
        typer.Option(metavar="OWNER/NAME", help="Also upload there; the token is HF_TOKEN's or `hf auth login`'s."),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make that repository private, if it is new.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch of that repository to upload to.")] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write heads as another engine loads them, checked by that engine's own rules, with a model card.

    What an engine would load silently wrong is refused, with the reason and an alternative. Files are split above 5 GB
    where the engine reads an index. --base also sets the name under which the engine loads the base.
    """
    console = open_console()
    from .base_model import as_dtype
    from .hub import check_repo_id, find_heads, push_folder
    from .interop.export import export_heads

    if (private or revision) and not push_to_hub:
        raise ValueError("export: got --private or --revision without --push-to-hub, which they belong to")
    if push_to_hub:
        check_repo_id(push_to_hub)
    done = export_heads(
        find_heads(heads),
        to.value,
        out,
        base=base,
        dtype=as_dtype(dtype.value) if dtype else None,
        trust_remote_code=trust_remote_code,
        repo_id=push_to_hub,
    )
    for note in done.notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    print(f"loaded by: {done.versions}")
    print(f"heads: {out} ({done.num_bytes / 1e6:,.1f} MB)")
    if push_to_hub:
        print(f"pushed: {push_folder(out, push_to_hub, private=private, revision=revision)}")


def import_command(
    source: Annotated[
        str,
        typer.Option(
            "--from",
            help="Directory or Hub name of heads in the files of vLLM, TGI, TensorRT-LLM, MLC-LLM, ModelOpt, the "
            "original code (v0 to v2, whole models too), or of this program.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Heads directory to write, new or empty.", show_default=False)],
    base: Annotated[
        str,
        typer.Option(help="The model that the heads were trained on; of a whole model: itself.", show_default=False),
    ],
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Take over heads that were trained elsewhere. Counted from the tensors; nothing in the files is executed.

    Calibrate them afterwards: `medusa calibrate` finds the tree that pays on this machine.
    """
    console = open_console()
    from .interop.import_heads import import_heads

    done = import_heads(find_source(source), out, base, trust_remote_code=trust_remote_code)
    for note in done.notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    config = done.config
    print(f"{config.num_heads} heads of {config.num_layers} layer(s), {config.lm_head} lm_head, {done.dtype}")
    print(f"heads: {out}")


def find_source(name_or_folder: str) -> Path:
    """A directory, or a Hub repository's data files."""
    from .hub import find_heads

    return find_heads(name_or_folder, patterns=("*.json", "*.safetensors", "medusa_lm_head.pt", "pytorch_model*.bin"))
