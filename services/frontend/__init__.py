"""The frontend: HTTP in, tokens out. Each folder imports only those below it (`tests/unit/test_walls.py`):

role, status_servicer  the process, and its gRPC service for operators
http                   server, routes, one exchange for each request, OpenAPI
cascade                requests to a cascade of models
pooling                requests to pooling models: prompts, and what is made of their vectors
answers                from tokens to the bodies and events that clients get
requests               from a checked body to a generation: keys, admission, plan, choices, resumption
placement              where a request goes: schedulers, waiting for an instance, recovery
workers                streams to the workers, liveness, and the requests in flight on them
text                   tokenizer, chat template, detokenizer, stop strings
mesh_metrics           what the whole mesh says under vLLM's names
metrics, errors, settings
"""
