"""Hidden states out of stock vLLM, through its worker extension class.

    engine core process                                     worker process
    LogitsProcessor --pre-hook--> capture --queue--> sender ==ZeroMQ==> stream --> whoever predicts

vLLM hands each step's last hidden states, one row per request, to its `LogitsProcessor` layer: what the final norm
made of the last layer, just before the vocabulary. A forward pre-hook on that layer (torch's own) sees them even where
the model itself runs as a captured CUDA graph, in which hooks on the model's layers are not run. The extension is
named to vLLM by `worker_extension_cls` and called by `collective_rpc`.

vLLM's own `extract_hidden_states` speculative method was considered and not taken: it writes the states of all tokens
into a KV cache of its own and occupies the connector, which the mesh needs for migration.
"""
