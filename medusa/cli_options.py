"""Options that commands share, and where what they print and write goes. Loads nothing heavy."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from .sampling import SamplingParams, Typical


class Dtype(str, Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class OnBadRecord(str, Enum):
    error = "error"
    skip = "skip"


Base = Annotated[str, typer.Option(help="Base model: a directory or a Hub name.", show_default=False)]
BaseOverride = Annotated[str | None, typer.Option("--base", help="Base model, where it is not as the heads name it.")]
Heads = Annotated[Path, typer.Option(help="Heads directory, as `medusa train` writes it.", show_default=False)]
Data = Annotated[
    list[str],
    typer.Option("--data", help="Conversations: JSONL (.xz, .gz) or Hub name; repeatable.", show_default=False),
]
MaxLength = Annotated[int, typer.Option(help="Tokens kept of a conversation.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Use only the first so many.")]
BadRecord = Annotated[OnBadRecord, typer.Option(help="What a broken record does.")]
DtypeOption = Annotated[Dtype, typer.Option(help="Type of the base model's weights.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the base model.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")]
JsonOut = Annotated[Path | None, typer.Option("--json", help="Also write the numbers here.")]

Temperature = Annotated[float, typer.Option(help="0: greedy; above, tokens are drawn, 1 being the base's own spread.")]
TopK = Annotated[int, typer.Option(help="Draw among so many likeliest tokens only; 0: all.")]
TopP = Annotated[float, typer.Option(help="Draw among the likeliest tokens that reach this probability; 1: all.")]
MinP = Annotated[float, typer.Option(help="Draw among tokens at least so likely, against the likeliest; 0: all.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1: less of what prompt and answer have said.")]
PresencePenalty = Annotated[float, typer.Option(help="Above 0: less of what the answer has said.")]
FrequencyPenalty = Annotated[float, typer.Option(help="Above 0: the less, the oftener the answer has said it.")]
Seed = Annotated[int | None, typer.Option(help="Of the tokens drawn; default: another one every time.")]


class AcceptanceOption(str, Enum):
    greedy = "greedy"
    rejection = "rejection"
    typical = "typical"


Acceptance = Annotated[
    AcceptanceOption | None,
    typer.Option(
        help="Which drafts are kept. greedy and rejection (the default above temperature 0) are lossless; typical is "
        "LOSSY: faster, not the base's own answers.",
        show_default=False,
    ),
]
Epsilon = Annotated[
    float | None, typer.Option(help="Of typical acceptance (lossy): probability that is enough [0.09].")
]
Delta = Annotated[
    float | None, typer.Option(help="Of typical acceptance (lossy): share of exp(-entropy) that is enough [0.3].")
]


def make_sampling(temperature: float, *, seed: int | None, **settings: float) -> SamplingParams:
    """Raises ValueError for a truncation that temperature 0 would ignore."""
    from .sampling import SamplingParams

    off = {"top_k": 0, "top_p": 1, "min_p": 0}
    if temperature == 0 and (given := [name for name, value in off.items() if settings.get(name, value) != value]):
        name = given[0].replace("_", "-")
        raise ValueError(f"--{name}: got {settings[given[0]]} with temperature 0, which is greedy; give --temperature")
    return SamplingParams(temperature, seed=seed, **settings)  # type: ignore[arg-type]


def make_acceptance(
    sampling: SamplingParams, acceptance: AcceptanceOption | None, epsilon: float | None, delta: float | None
) -> Typical | None:
    """Raises ValueError for a rule that does not fit, or thresholds without the rule that they belong to."""
    from .sampling import Typical, choose_acceptance

    given = {name: value for name, value in (("epsilon", epsilon), ("delta", delta)) if value is not None}
    if acceptance is not AcceptanceOption.typical:
        if given:
            raise ValueError(f"--{next(iter(given))}: belongs to --acceptance typical, which is lossy; leave it out")
        return choose_acceptance(sampling, "greedy" if acceptance is AcceptanceOption.greedy else None)
    return choose_acceptance(sampling, Typical(**given))


def open_console() -> Console:
    """Also quietens what the libraries print when nobody watches."""
    from rich.console import Console
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    return Console()


def write_json(path: Path | None, content: Any) -> None:
    if path is None:
        return
    import json

    from .checkpoint import write_atomically

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically({path: lambda file: file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")})
    print(f"numbers: {path}")
