"""An answer as it comes, on a terminal: tokens that the heads had drafted in green, then how it went."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from medusa.model import MedusaModel
from medusa.sampling import GREEDY_SAMPLING, SamplingParams, Typical

from .generation import Prompt, stream_request


def show_answer(
    model: MedusaModel,
    prompt: Prompt,
    console: Console,
    *,
    max_new_tokens: int,
    stop: Sequence[str] = (),
    speculate: bool = True,
    sampling: SamplingParams = GREEDY_SAMPLING,
    typical: Typical | None = None,
) -> None:
    """Answer to the console, statistics to a last dim line. A step's text is green where all of it but the last token
    had been drafted, so green runs show what was won. Lossy acceptance is said first."""
    request, pieces = stream_request(
        model,
        prompt,
        max_new_tokens=max_new_tokens,
        stop=stop,
        speculate=speculate,
        sampling=sampling,
        acceptance=typical,
    )
    if typical:
        console.print(
            f"LOSSY: typical acceptance (epsilon {typical.epsilon}, delta {typical.delta}), not the base's own answer",
            style="yellow",
            highlight=False,
        )
    for piece in pieces:
        style = "green" if piece.num_drafted_accepted else ""
        console.print(Text(piece.text, style=style), end="", soft_wrap=True)
    stats = request.stats
    console.print()
    console.print(
        f"{stats.num_tokens} tokens in {stats.seconds:.2f} s: {stats.tokens_per_second:.1f} tokens/s, "
        f"{stats.mean_acceptance_length:.2f} per step, first after {1000 * stats.time_to_first_token_s:.0f} ms",
        style="dim",
        highlight=False,
    )
