"""One of each role and three workers, and the requests that tests send."""

import random
from pathlib import Path
from typing import Any

from engine_worker.settings import WorkerSettings
from fault_simulation.client import ReceivedAnswer, ask
from fault_simulation.nodes import HTTP_PORT, STORE, SimulatedMesh
from fault_simulation.oracle import CHAT_PATH, COMPLETIONS_PATH, ExpectedChoice, Oracle
from services.cascade.settings import CascadeSettings
from simulator.instance.config import InstanceConfig

MODEL = "model"
MODEL_PATH = Path(__file__).resolve().parents[3] / "demo/models/demo-small"
SMALL = WorkerSettings(model="small", model_path=str(MODEL_PATH), engine="simulated")
LARGE = WorkerSettings(
    model="large",
    model_path=str(MODEL_PATH),
    engine="simulated",
    engine_arg=("instance.output.first_token_id=300", "cost.fixed_ms=8"),
)
CASCADE = "cascade"
WORKERS = ("worker-0", "worker-1", "worker-2")
MEMBERS = (STORE, "monitor", "scheduler", *WORKERS, "frontend")


def small_mesh(seed: int) -> SimulatedMesh:
    """Started by nobody yet."""
    mesh = SimulatedMesh(seed)
    mesh.add_monitor("monitor")
    mesh.add_scheduler("scheduler")
    mesh.add_frontend("frontend")
    for name in WORKERS:
        mesh.add_worker(name, WorkerSettings(model=MODEL, model_path=str(MODEL_PATH), engine="simulated"))
    return mesh


def cascade_mesh(seed: int) -> SimulatedMesh:
    """Two models that give different answers, two instances each, with whom it takes to make a cascade of them."""
    mesh = SimulatedMesh(seed)
    mesh.add_monitor("monitor")
    mesh.add_scheduler("scheduler")
    mesh.add_planner("planner")
    mesh.add_predictor("predictor")
    mesh.add_cascade("router", CascadeSettings(sample_window_s=5.0))
    for settings in (SMALL, LARGE):
        for number in range(2):
            mesh.add_worker(f"{settings.model}-{number}", settings)
    mesh.add_frontend("frontend")
    return mesh


def oracle() -> Oracle:
    """Of the model that its workers serve."""
    return Oracle(MODEL, MODEL_PATH, InstanceConfig())


def request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Path and body."""
    words = " ".join(str(rng.randrange(1000)) for _ in range(rng.randrange(1, 60)))
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": rng.randrange(20, 80),
        "stream": rng.random() < 0.8,
        "n": rng.choice((1, 1, 2)),
        "temperature": rng.choice((0.0, 1.0)),
    }
    if rng.random() < 0.5:
        body["seed"] = rng.randrange(1000)
    if rng.random() < 0.3:
        body["stop"] = [rng.choice("aeiou0123")]
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    if rng.random() < 0.5:
        return CHAT_PATH, {**body, "messages": [{"role": "user", "content": words}]}
    return COMPLETIONS_PATH, {**body, "prompt": words}


async def send(mesh: SimulatedMesh, path: str, body: dict[str, Any]) -> ReceivedAnswer:
    """To the frontend."""
    return await ask(mesh.network, mesh.client, f"frontend:{HTTP_PORT}", path, body, {})


def is_as_expected(answer: ReceivedAnswer, expected: tuple[ExpectedChoice, ...]) -> bool:
    """Whole, with the exact text and the number of tokens."""
    if answer.status != 200 or answer.error or len(answer.choices) != len(expected):
        return False
    received = [answer.choices[index] for index in range(len(expected))]
    return all(
        (one.text, one.finish) == (other.text, other.finish) for one, other in zip(received, expected, strict=True)
    ) and answer.completion_tokens == sum(choice.tokens for choice in expected)
