"""The process that reads answers in formats that this frontend has no parser of its own for: vLLM's, beside it."""
