"""Every metric of the gateway, by name, with its help text and labels."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_TTFB_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class GatewayMetrics:
    """`penstock_gateway_...`; models are labels only once they are known to be served."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"penstock_gateway_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"penstock_gateway_{name}", text, labels, registry=registry)

        self.requests = counter("requests", "Requests that were sent to an endpoint and ended", "model", "reason")
        self.refused = counter("refused", "Requests that the gateway was told to refuse, by status", "status")
        self.passed = counter("passed", "Requests whose endpoint was left to Envoy: they name no model")
        self.unread = counter(
            "unread_prompts", "Requests placed by load alone, because their prompt could not be read", "model"
        )
        self.rerouted = counter("rerouted", "Requests that another endpoint served than the one picked", "model")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens, as the answers say", "model")
        self.cached_tokens = counter(
            "cached_tokens", "Those found in a prefix cache, as far as the answers say", "model"
        )
        self.generated_tokens = counter("generated_tokens", "Generated tokens, as the answers say", "model")
        self.streams = gauge("streams", "Requests that pass now")
        self.held_bytes = gauge("held_bytes", "Bodies that are held until their endpoint is known")
        self.pick = Histogram(
            "penstock_gateway_pick_seconds",
            "From a body's end to its endpoint, waiting included",
            buckets=_SECONDS,
            registry=registry,
        )
        self.first_byte = Histogram(
            "penstock_gateway_first_byte_seconds",
            "From a request's headers to the first byte of its answer's body",
            ["model"],
            buckets=_TTFB_BUCKETS_S,
            registry=registry,
        )
        self.waiting = gauge("waiting_requests", "Requests that wait for an endpoint")
        self.refused_waits = counter("refused_waits", "Requests refused because too many wait for an endpoint")
        self.fallback_placements = counter("fallback_placements", "Requests placed without the scheduler")
        self.fallback_in_force = gauge("fallback_in_force", "1 while requests are placed without the scheduler")
        self.hedged_placements = counter("hedged_placements", "Placements asked of a second scheduler for slowness")
        self.scheduler_misses = counter(
            "scheduler_misses", "Times that a scheduler gave no answer that could be used", "scheduler", "reason"
        )
        self.scheduler_usable = gauge(
            "scheduler_usable", "1 while a scheduler may be asked for placements", "scheduler"
        )
