"""Every metric of the frontend, by name, with its help text and labels."""

from typing import Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from mesh.vllm_metrics import VllmNames

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_INTER_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_TIER_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_REQUEST_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_E2E_BUCKETS_S = (0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


_CHOICES = (1, 2, 5, 10, 20)

ABORTED: Final = "abort"
"""How a choice ends whose client has left."""
FAILED: Final = "error"
FINISHES: Final = ("stop", "length", ABORTED, FAILED)
"""Why choices end. Each is exported from a model's first request on, so that an alert finds a zero."""


class ModelMetrics:
    """The metrics of one model or cascade, looked up once: labels cost as much as what they label."""

    def __init__(self, metrics: "FrontendMetrics", model: str) -> None:
        self.prompt_tokens = metrics.prompt_tokens.labels(model)
        self.cached_tokens = metrics.cached_tokens.labels(model)
        self.generated_tokens = metrics.generated_tokens.labels(model)
        self.ttft = metrics.ttft.labels(model)
        self.inter_token = metrics.inter_token.labels(model)
        self.e2e = metrics.e2e.labels(model)
        self.request_prompt_tokens = metrics.request_prompt_tokens.labels(model)
        self.request_generated_tokens = metrics.request_generated_tokens.labels(model)
        self.longest_choice_tokens = metrics.longest_choice_tokens.labels(model)
        self.computed_prompt_tokens = metrics.computed_prompt_tokens.labels(model)
        self.time_per_output_token = metrics.time_per_output_token.labels(model)
        self.asked_choices = metrics.asked_choices.labels(model)
        self.asked_max_tokens = metrics.asked_max_tokens.labels(model)
        self.finished = {reason: metrics.finished.labels(model, reason) for reason in FINISHES}


class CascadeMetrics:
    """`penstock_frontend_cascade_...`. Tiers are labelled by their model's name. A client's own times are under the
    cascade's name among those of the models."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"penstock_frontend_cascade_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            labels = ("cascade", "tier")
            return Histogram(f"penstock_frontend_cascade_{name}", text, labels, buckets=buckets, registry=registry)

        self.answers = counter(
            "answers", "Answers that cascades gave, by tier and reason", "cascade", "tier", "because"
        )
        self.escalations = counter(
            "escalations",
            "Requests that went on to a further tier, by that tier and reason",
            "cascade",
            "tier",
            "because",
        )
        self.broken_off = counter(
            "broken_off", "Answers that failed after their client had begun to get them", "cascade", "tier"
        )
        self.speculations = counter(
            "speculations",
            "Answers that were begun ahead, by their tier: used, abandoned or failed",
            "cascade",
            "tier",
            "outcome",
        )
        self.speculated_tokens_wasted = counter(
            "speculated_tokens_wasted", "Tokens generated ahead for answers that were abandoned", "cascade", "tier"
        )
        self.unjudged = counter("unjudged", "Answers of tiers that nobody could judge", "cascade")
        self.untold = counter(
            "untold", "Requests missing from the samples of the workload: no cascade router took them", "cascade"
        )
        self.tier_ttft = histogram("tier_ttft_seconds", "From a tier's being asked to its first token", _TTFT_BUCKETS_S)
        self.tier_seconds = histogram(
            "tier_seconds", "From a tier's being asked to the end of its whole answer", _TIER_BUCKETS_S
        )


class PlacementMetrics(Protocol):
    """What whoever places requests counts, under the name of its role."""

    fallback_placements: Counter
    fallback_in_force: Gauge
    hedged_placements: Counter
    scheduler_misses: Counter
    scheduler_usable: Gauge
    waiting: Gauge
    refused_waits: Counter


class FrontendMetrics:
    """`penstock_frontend_...`; models are labels only once they are known to be served.

    Clients' times are under the name that the client asked for: a tier's answer to a cascade counts under `cascade`.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"penstock_frontend_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"penstock_frontend_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"penstock_frontend_{name}", text, ["model"], buckets=buckets, registry=registry)

        vllm = VllmNames(registry)
        self.requests = counter("requests", "Requests that ended", "model", "endpoint", "status")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of placed requests", "model")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens found in a prefix cache", "model")
        self.generated_tokens = counter("generated_tokens", "Tokens relayed", "model")
        self.fallback_placements = counter("fallback_placements", "Requests placed without the scheduler")
        self.scheduler_misses = counter(
            "scheduler_misses", "Times that a scheduler gave no answer that could be used", "scheduler", "reason"
        )
        self.hedged_placements = counter("hedged_placements", "Placements asked of a second scheduler for slowness")
        self.token_gaps = counter("token_gaps", "Requests whose token stream was broken")
        self.worker_losses = counter("worker_losses", "Requests that were lost with their worker", "reason")
        self.recoveries = counter("recoveries", "Requests placed again after the loss of their owner", "reason")
        self.failed_recoveries = counter("failed_recoveries", "Requests that could not be placed again", "reason")
        self.bounces = counter(
            "bounces", "Requests that came back because more waited at their worker than was believed"
        )
        self.hung_workers = counter("hung_workers", "Workers found to hang", "hang")
        self.dead_workers = counter("dead_workers", "Workers whose connection ended while they had requests")
        self.slow_clients = counter("slow_clients", "Requests aborted because the client did not read")
        self.disconnects = counter("disconnects", "Requests aborted because the client went away")
        self.lost_usage_records = counter(
            "lost_usage_records", "Requests whose usage could not be written (--usage-folder)"
        )
        self.budget_refusals = counter(
            "budget_refusals", "Requests refused because their key's budget is used up", "period"
        )
        self.unwritten_budgets = gauge(
            "unwritten_budgets", "Keys whose tokens the state store has not counted against their budgets yet"
        )
        self.connections = gauge("connections", "Clients that are connected")
        self.closed_connections = counter(
            "closed_connections", "Connections closed or refused because of what they hold or send", "reason"
        )
        self.media_bytes = gauge("media_bytes", "Images, recordings and films that running requests hold")
        self.named_media_bytes = gauge("named_media_bytes", "Images, recordings and films kept under clients' names")
        self.media_failures = counter("media_failures", "Requests whose images and the like could not be fetched")
        self.unread_members = gauge(
            "unread_members", "Members whose metrics are missing under vLLM's names, when last somebody wanted them"
        )
        self.running = gauge("running_requests", "Requests being served")
        self.queued = gauge("queued_requests", "Requests waiting for admission")
        self.resumed_streams = counter("resumed_streams", "Streams that a client came back for")
        self.uncopied_responses = counter(
            "uncopied_responses", "Responses (/v1/responses) that no other frontend has a copy of, though there is one"
        )
        self.background_responses = gauge("background_responses", "Responses that are made in the background")
        self.taken_over_responses = counter(
            "taken_over_responses", "Responses in the background that were gone on with after their frontend had left"
        )
        self.outside_prompts = counter("outside_prompts", "Prompts that vLLM made, in the process beside the frontend")
        self.outside_answers = counter("outside_answers", "Answers that vLLM's parsers read, in that process")
        self.parser_losses = counter("parser_losses", "Times that this process was lost")
        self.parser_replays = counter("parser_replays", "Answers read anew because their parser process was lost")
        self.waiting = gauge("waiting_requests", "New requests that wait for an instance")
        self.refused_waits = counter("refused_waits", "New requests refused because too many wait for an instance")
        self.fallback_in_force = gauge("fallback_in_force", "1 while requests are placed without the scheduler")
        self.scheduler_usable = gauge(
            "scheduler_usable", "1 while a scheduler may be asked for placements", "scheduler"
        )
        self.ttft = histogram("ttft_seconds", "From the request's arrival to its answer's first token", _TTFT_BUCKETS_S)
        self.inter_token = histogram("inter_token_seconds", "Between two chunks of a choice", _INTER_TOKEN_BUCKETS_S)
        self.e2e = histogram("e2e_seconds", "From the request's arrival to its end", _E2E_BUCKETS_S)
        self.finished = counter("finished_choices", "Choices that ended, by finish reason", "model", "finished_reason")
        self.request_prompt_tokens = histogram(
            "request_prompt_tokens", "Prompt tokens of a request that ended", _REQUEST_TOKENS
        )
        self.request_generated_tokens = histogram(
            "request_generated_tokens", "Tokens that a request generated", _REQUEST_TOKENS
        )
        self.longest_choice_tokens = histogram(
            "longest_choice_tokens", "Tokens of a request's longest choice", _REQUEST_TOKENS
        )
        self.computed_prompt_tokens = histogram(
            "computed_prompt_tokens", "Prompt tokens of a request that were in no prefix cache", _REQUEST_TOKENS
        )
        self.time_per_output_token = histogram(
            "time_per_output_token_seconds", "Mean time of a choice's tokens after the first", _INTER_TOKEN_BUCKETS_S
        )
        self.asked_choices = histogram("asked_choices", "Choices of each prompt that were asked for (n)", _CHOICES)
        self.asked_max_tokens = histogram("asked_max_tokens", "Tokens that a choice may have", _REQUEST_TOKENS)
        for own, name in (
            (self.prompt_tokens, "prompt_tokens"),
            (self.prompt_tokens, "prefix_cache_queries"),
            (self.cached_tokens, "prefix_cache_hits"),
            (self.cached_tokens, "prompt_tokens_cached"),
            (self.generated_tokens, "generation_tokens"),
            (self.finished, "request_success"),
            (self.request_prompt_tokens, "request_prompt_tokens"),
            (self.request_generated_tokens, "request_generation_tokens"),
            (self.ttft, "time_to_first_token_seconds"),
            (self.inter_token, "inter_token_latency_seconds"),
            (self.e2e, "e2e_request_latency_seconds"),
            (self.longest_choice_tokens, "request_max_num_generation_tokens"),
            (self.computed_prompt_tokens, "request_prefill_kv_computed_tokens"),
            (self.time_per_output_token, "request_time_per_output_token_seconds"),
            (self.asked_choices, "request_params_n"),
            (self.asked_max_tokens, "request_params_max_tokens"),
        ):
            vllm.add(own, name)
        self.cascade = CascadeMetrics(registry)
        self._models: dict[str, ModelMetrics] = {}

    def of(self, model: str) -> ModelMetrics:
        """Those of a model or a cascade that is served."""
        if model not in self._models:
            self._models[model] = ModelMetrics(self, model)
        return self._models[model]
