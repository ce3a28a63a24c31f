"""Open-loop replay of a trace through an OpenAI-compatible endpoint: the load generator of `penstock bench`."""
