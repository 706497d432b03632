"""Prometheus metrics: vLLM's names under the prefix `medusa:`, so that its dashboards need one word changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..request import Request
from ..service import EngineLoad

if TYPE_CHECKING:
    from .prepare import Job

PREFIX = "medusa:"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)
_COUNT = (1, 2, 5, 10, 20)
LABELS = ("model_name",)


class Metrics:
    """One server's own registry. The `on_*` methods may be called from any thread; those of a request's life are a
    `StepListener`'s."""

    def __init__(self, model_id: str) -> None:
        self.registry = CollectorRegistry()
        self._model_id = model_id
        self._running = self._gauge("num_requests_running", "Requests in the batch.")
        self._waiting = self._gauge("num_requests_waiting", "Requests in the queue.")
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Share of the rows' cache slots in use, 0 to 1.")
        self._prefix_bytes = self._gauge("prefix_cache_bytes", "Memory of the prefix cache.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._cached_tokens = self._counter("prefix_cache_hits", "Prompt tokens taken from the prefix cache.")
        self._queried_tokens = self._counter("prefix_cache_queries", "Prompt tokens looked up there.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._success = self._counter("request_success", "Requests finished.", "finished_reason")
        self._drafts = self._counter("spec_decode_num_drafts", "Verify steps.")
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Tokens drafted (all nodes of a tree).")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.")
        self._accepted_at = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Drafted tokens accepted, by place in the draft.", "position"
        )
        self._http = self._counter("http_requests", "HTTP responses.", "method", "route", "status")
        self._first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self._gap = self._histogram("inter_token_latency_seconds", "Between two steps' tokens of a request.", _GAPS)
        self._per_token = self._histogram("request_time_per_output_token_seconds", "After the first token.", _GAPS)
        self._latency = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", _SECONDS)
        self._queue_time = self._histogram("request_queue_time_seconds", "Waiting for a row.", _SECONDS)
        self._prefill_time = self._histogram("request_prefill_time_seconds", "From a row to the first token.", _SECONDS)
        self._decode_time = self._histogram("request_decode_time_seconds", "From the first token to the end.", _SECONDS)
        self._prompt_length = self._histogram("request_prompt_tokens", "Prompt length, tokens.", _TOKENS)
        self._answer_length = self._histogram("request_generation_tokens", "Answer length, tokens.", _TOKENS)
        self._max_tokens = self._histogram("request_params_max_tokens", "max_tokens asked for.", _TOKENS)
        self._n = self._histogram("request_params_n", "n asked for.", _COUNT)
        self._iteration_tokens = self._histogram("iteration_tokens_total", "Tokens computed in a step.", _TOKENS)

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(PREFIX + name, help_text, LABELS, registry=self.registry).labels(self._model_id)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        counter = Counter(PREFIX + name, help_text, LABELS + labels, registry=self.registry)
        return counter if labels else counter.labels(self._model_id)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(PREFIX + name, help_text, LABELS, registry=self.registry, buckets=buckets)
        return histogram.labels(self._model_id)

    def expose(self, load: EngineLoad) -> tuple[bytes, str]:
        """(text, content type), the gauges as `load` says."""
        self._running.set(load.num_running)
        self._waiting.set(load.num_waiting)
        self._kv_usage.set(load.kv_tokens_used / load.kv_tokens_capacity if load.kv_tokens_capacity else 0)
        self._prefix_bytes.set(load.prefix_cache_bytes)
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def on_http(self, method: str, route: str, status: int) -> None:
        """route: the path's pattern; a path itself would make a series of every stranger's guess."""
        self._http.labels(self._model_id, method, route, str(status)).inc()

    def on_request(self, job: Job) -> None:
        self._n.observe(job.n)
        for request in job.requests:
            self._max_tokens.observe(request.max_new_tokens)

    def on_piece(self, request: Request, gap_s: float | None, num_tokens: int) -> None:
        """gap_s: seconds since the request's piece before; None for its first one."""
        self._generation_tokens.inc(num_tokens)
        if gap_s is not None:
            self._gap.observe(gap_s)
            return
        self._first_token.observe(request.stats.time_to_first_token_s)
        self._queue_time.observe(request.stats.queue_s)
        self._prefill_time.observe(request.stats.prefill_s)

    def on_step(self, num_tokens: int, seconds: float, load: EngineLoad) -> None:
        self._iteration_tokens.observe(num_tokens)

    def on_first_token(self, request: Request) -> None:
        """`on_piece` has counted it."""

    def on_finished(self, request: Request) -> None:
        stats = request.stats
        self._success.labels(self._model_id, request.finish_reason or "error").inc()
        self._prompt_tokens.inc(len(request.prompt_ids))
        self._queried_tokens.inc(len(request.prompt_ids))
        self._cached_tokens.inc(request.num_cached_tokens)
        self._prompt_length.observe(len(request.prompt_ids))
        self._answer_length.observe(stats.num_tokens)
        self._latency.observe(stats.seconds)
        self._decode_time.observe(stats.decode_s)
        if stats.num_tokens > 1:
            self._per_token.observe(stats.decode_s / (stats.num_tokens - 1))
        self._drafts.inc(stats.num_steps)
        self._draft_tokens.inc(stats.num_drafted)
        self._accepted.inc(sum(stats.accepted_by_position))
        for position, count in enumerate(stats.accepted_by_position):
            self._accepted_at.labels(self._model_id, str(position)).inc(count)
