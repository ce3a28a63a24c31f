"""Arrow: prefill and decode as properties of requests, instances in four elastic pools, decisions by SLOs."""
