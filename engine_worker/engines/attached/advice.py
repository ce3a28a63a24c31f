"""What an attached server could do besides, and how it would have to be started for it. Pure."""

import json
from urllib.parse import urlsplit

from engine_worker.engines.attached.settings import AttachedSettings
from engine_worker.engines.attached.wire import Abilities
from engine_worker.engines.vllm.connector.settings import CONNECTOR_CLASS, CONNECTOR_MODULE
from engine_worker.engines.vllm.hidden_states.message import EXTENSION_CLASS

EVENTS_PORT = 5557
BUFFERED_BATCHES = 10_000


def advice(settings: AttachedSettings, abilities: Abilities, cores: int) -> tuple[str, ...]:
    """Paragraphs for whoever attaches it. `cores`: the engine cores that it has by its metrics; 0 if it has none."""
    told = [] if settings.control else [_movement(settings, abilities)]
    if not (abilities.takes_tokens and abilities.tells_tokens):
        told.append(
            "It is talked to by text: tokens are counted at this side, logprobs are missing, and a request that goes "
            "on here after another was lost may split its text into other tokens."
        )
    if abilities.is_vllm and not settings.kv_events:
        host = urlsplit(settings.url).hostname or "HOST"
        # Each engine core but the first has the port after that of the one before.
        replay_port = EVENTS_PORT + max(1, cores)
        told.append(
            "Its prefix cache is not known, so requests are placed by load. To have it known, start it with\n"
            f"    --kv-events-config '{kv_events_config(EVENTS_PORT, replay_port)}'\n"
            f"and attach it with --kv-events tcp://{host}:{EVENTS_PORT} --kv-replay tcp://{host}:{replay_port}"
        )
    if cores > 1 and settings.data_parallel_size == 1:
        told.append(
            f"It has {cores} engine cores. As they are, the server chooses among them, and the cache of the first only "
            "is known: attach it with --engine-arg data_parallel_size="
            f"{cores} to have requests placed on each by its load and its cache."
        )
    return tuple(told)


def kv_events_config(events_port: int, replay_port: int) -> str:
    """The value of vLLM's option. An endpoint with a * is bound there, and this side connects."""
    return json.dumps(
        {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{events_port}",
            "replay_endpoint": f"tcp://*:{replay_port}",
            "buffer_steps": BUFFERED_BATCHES,
        }
    )


def kv_transfer_config(control: str) -> str:
    """The value of vLLM's option for a server whose requests are to move."""
    return json.dumps(
        {
            "kv_connector": CONNECTOR_CLASS,
            "kv_connector_module_path": CONNECTOR_MODULE,
            "kv_role": "kv_both",
            # What could not be pulled ends the carrier that was to bring it, and nothing else.
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"control": control},
        }
    )


def default_control(url: str) -> str:
    """A control socket for the server there."""
    parts = urlsplit(url)
    return f"ipc:///tmp/penstock-{parts.hostname}-{parts.port or 80}.sock"


def _movement(settings: AttachedSettings, abilities: Abilities) -> str:
    said = "It serves requests and recovers them by their tokens. Its requests do not move with their KV, and their "
    said += "lengths are not predicted"
    if not abilities.is_vllm:
        return f"It is no vLLM. {said}: both take a vLLM."
    control = default_control(settings.url)
    return (
        f"{said}. To have both, install Penstock beside the server, and start it on this machine with\n"
        f"    VLLM_USE_V2_MODEL_RUNNER=0 vllm serve ... \\\n"
        f"    --kv-transfer-config '{kv_transfer_config(control)}' \\\n"
        f"    --worker-extension-cls {EXTENSION_CLASS}\n"
        f"and attach it with --control {control}"
    )
