"""KV blocks in the memory of a host, shared by the instances on it: see docs/host_tier.md."""
