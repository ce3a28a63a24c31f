"""Settings of an attached engine (`--engine-arg`)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttachedSettings:
    """A running server and what it does not say of itself."""

    url: str
    """Where it listens, such as http://gpu-1:8000."""
    gateway_url: str = ""
    """Where the Envoy of a gateway reaches it, if not there."""
    served_model: str = ""
    """Which of its models; empty: its first one that is no LoRA adapter."""
    api_key: str = ""
    """What it asks of its clients; empty: PENSTOCK_ATTACH_API_KEY, or nothing."""
    model_path: str = ""
    """Directory of the tokenizer's files; by default the worker's."""
    kv_events: str = ""
    """Where its KV events come from, as ZMQ writes it. tcp://HOST:PORT for a server that was started with an endpoint
    tcp://*:PORT; with a * in it, this side listens and the server's endpoint names this host. Empty: it sends none."""
    kv_replay: str = ""
    """Its replay_endpoint, tcp://HOST:PORT, for batches that were missed; empty: it has none."""
    control: str = ""
    """The control socket of its connector, ipc:///PATH or tcp://127.0.0.1:PORT, if it was started with ours; empty:
    its requests do not move."""
    control_token: str = ""
    """What that socket asks for; empty: PENSTOCK_ATTACH_CONTROL_TOKEN, or nothing."""
    data_parallel_size: int = 1
    """Engine cores that it has, as its own option of this name says."""
    kv_blocks: int = 0
    """KV blocks that it has, in all its engine cores; 0: what its metrics say."""
    block_size: int = 0
    """Tokens of one; 0: what its metrics say."""
    max_model_len: int = 0
    """Prompt and output together; 0: what it says of its model."""
    tokenizer_mode: str = ""
    """What its own option of this name says, or what vLLM chooses for its model; empty: auto."""
    max_num_seqs: int = 256
    """Requests that one of its steps may serve, in each engine core: it does not say."""
    max_num_batched_tokens: int = 8192
    """Token budget of its steps, in each engine core: it does not say."""
    max_queued_requests: int = 1024
    """Requests that may wait there beyond `max_num_seqs`; more are refused."""
    max_logprobs: int = 20
    """Most likely tokens that it tells logprobs of."""
    poll_s: float = 0.25
    """How often its metrics are read, by which it is also known to live."""
    answer_s: float = 2.0
    """What it is given to answer such a question; after three in a row without an answer it is taken for lost."""
    start_s: float = 60.0
    """How long a server that is not there yet is waited for, before the worker ends and is started again."""
