"""Bounds of every connection between two processes of the mesh."""

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
DEFAULT_DEADLINE_S = 5.0
KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 3_000
# Since gRPC 1.85 keepalive_timeout_ms alone leaves a ping 60 s to come back; this is the one that counts.
PING_TIMEOUT = ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    PING_TIMEOUT,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted peer must be found again within a second, not after gRPC's default of up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # What an attempt to connect gets, whatever the name says; one that is refused is repeated sooner. With the 100 ms
    # that stood here, calls on a machine at load 8 ended UNAVAILABLE though their peer was about to answer.
    ("grpc.min_reconnect_backoff_ms", 1_000),
    # Subchannels are shared inside a process by default, with their reconnect back-off.
    ("grpc.use_local_subchannel_pool", 1),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    PING_TIMEOUT,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Two processes on one port would silently share the connections.
    ("grpc.so_reuseport", 0),
)
