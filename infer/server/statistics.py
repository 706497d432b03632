"""How one answer's decoding went, in vLLM's words."""

from __future__ import annotations

from ..request import GenerationStats, Request
from .responses import ResponseMetrics, SpeculativeDecoding, Timing


def response_metrics(requests: list[Request]) -> ResponseMetrics | None:
    """None for several choices: their steps are not one run."""
    if len(requests) != 1:
        return None
    stats = requests[0].stats
    timing = Timing(
        queue_s=stats.queue_s,
        prefill_s=stats.prefill_s,
        decode_s=stats.decode_s,
        time_to_first_token_s=stats.time_to_first_token_s,
    )
    return ResponseMetrics(speculative_decoding=speculative_decoding(stats), timing=timing)


def speculative_decoding(stats: GenerationStats) -> SpeculativeDecoding:
    kept = stats.accepted_by_position  # steps that kept at least d + 1 drafted tokens
    at_least = [stats.num_steps, *kept, 0]
    return SpeculativeDecoding(
        mean_acceptance_length=stats.mean_acceptance_length,
        draft_acceptance_rate=sum(kept) / stats.num_drafted if stats.num_drafted else None,
        acceptance_histogram=[more - fewer for more, fewer in zip(at_least, at_least[1:], strict=False)],
        num_spec_steps=stats.num_steps,
        num_accepted_draft_tokens=sum(kept),
        num_draft_tokens=stats.num_drafted,
        num_spec_tokens=len(kept),
    )
