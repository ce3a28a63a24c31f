"""What predicting remaining lengths costs per decode step (STAR, section 5.3: 0.38 % at every 20 steps).

    python -m benchmarks.prediction_overhead [--model demo-large] [--rounds 12] [--json FILE]

One vLLM engine decodes full batches over and over; hidden states are captured at none of the steps, at every 20th and
at every one in turn, and a length predictor in a process of its own is asked. CPU time of the engine core, of the
worker's side and of the predictor is counted for each turn, so that other load on the machine matters little. The cost
of one prediction is what every step of the third kind has more than one of the first; at every 20th step it is a
twentieth of that.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import psutil

from controlplane.model.request import EngineRequest, SamplingParams
from engine_worker.checkpoint_fingerprint import checkpoint_fingerprint
from engine_worker.engines.vllm.engine import VllmEngine
from engine_worker.engines.vllm.settings import VllmSettings
from engine_worker.prediction.loop import PredictionLoop
from engine_worker.prediction.predictor_link import PredictorLink
from engine_worker.prediction.state import PredictionState
from engine_worker.request_table import RequestTable
from mesh.membership import Member
from mesh.runtime import GrpcTransport, SystemClock, SystemThreads

MODELS: Final = Path(__file__).resolve().parents[1] / "demo"
BATCH: Final = 32
TOKENS: Final = 160
PROMPT: Final = 40
EVERY: Final = (0, 20, 1)
HOOK_CALLS: Final = 2000
PARTS: Final = ("engine", "worker", "predictor")


@dataclass(slots=True)
class Turn:
    """CPU time of one batch, per decode step."""

    every_steps: int
    cpu_ms: dict[str, float]
    wall_ms: float
    predictions: int


@dataclass(slots=True)
class Processes:
    """The processes whose CPU time is counted: engine core, worker and predictor."""

    core: psutil.Process
    predictor: psutil.Process
    own: psutil.Process = field(default_factory=lambda: psutil.Process(os.getpid()))

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of each part so far."""
        of = dict(zip(PARTS, (self.core, self.own, self.predictor), strict=True))
        return {name: sum(process.cpu_times()[:2]) for name, process in of.items()}


def serve_predictor(artefact: Path, address: Connection) -> None:
    """Run in a process of its own: a length predictor on a free port, told through `address`."""

    async def serve() -> None:

        from prometheus_client import CollectorRegistry

        from mesh.rpc.server import RpcServer
        from penstock.v1 import predictor_pb2_grpc
        from services.predictor.artefact_registry import ArtefactRegistry
        from services.predictor.metrics import PredictorMetrics
        from services.predictor.service import PredictorService

        artefacts = ArtefactRegistry((artefact,))
        artefacts.reload()
        server = RpcServer(GrpcTransport())
        service = PredictorService(
            artefacts,
            None,
            PredictorMetrics(CollectorRegistry()),
            SystemThreads().pool(1, "predictor"),
            SystemClock().now_s,
        )
        server.add(predictor_pb2_grpc.add_LengthPredictorServicer_to_server, service, "penstock.v1.LengthPredictor")
        address.send(await server.start())
        await asyncio.Event().wait()

    asyncio.run(serve())


async def turn(
    engine: VllmEngine, table: RequestTable, state: PredictionState, every: int, processes: Processes, number: int
) -> Turn:
    """Decode one batch, with states captured every `every` steps (0: none); returns its CPU and wall time a step."""
    await engine.capture_hidden_states(every)
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    before_predictions = state.predictions_total
    steps = left = 0
    before, started_s = processes.cpu_s(), 0.0
    for index in range(BATCH):
        prompt = tuple(10 + (number * 7919 + index * 104729 + place * 31) % 600 for place in range(PROMPT))
        request = EngineRequest(f"turn-{number}-{index}", prompt, sampling)
        table.admit(request, stream_id=1, frontend_id="f", now_s=0.0)
        engine.submit(request)
        left += 1
    async for step in engine.outputs():
        table.route(step)
        # The first steps prefill; the clock runs over those that decode the whole batch.
        if len(step.deltas) == BATCH:
            if not steps:
                before, started_s = processes.cpu_s(), time.perf_counter()
            steps += 1
        left -= sum(delta.finish_reason is not None for delta in step.deltas)
        if not left:
            break
    wall_s = time.perf_counter() - started_s
    after = processes.cpu_s()
    steps -= 1
    cpu_ms = {name: 1e3 * (after[name] - before[name]) / steps for name in PARTS}
    return Turn(every, cpu_ms, 1e3 * wall_s / steps, state.predictions_total - before_predictions)


async def measure(model: str, rounds: int) -> list[Turn]:
    """All turns, the first round left out."""
    model_path, artefact = MODELS / "models" / model, MODELS / "predictors" / model
    # As `services.predictor` sets it for itself; here NumPy is there before it.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    predictor = context.Process(target=serve_predictor, args=(artefact, there), daemon=True)
    predictor.start()
    there.close()  # so that the end of the process is the end of the pipe
    address = await asyncio.to_thread(here.recv)
    engine = VllmEngine(VllmSettings(str(model_path), dtype="float32", max_num_seqs=BATCH, movable=False))
    known = {child.pid for child in psutil.Process().children(recursive=True)}
    await engine.start()
    cores = [child for child in psutil.Process().children(recursive=True) if child.pid not in known]
    core = max(cores, key=lambda process: process.memory_info().rss)
    assert predictor.pid is not None
    processes = Processes(core, psutil.Process(predictor.pid))
    table, state = RequestTable(), PredictionState(EVERY[1])
    member = Member("predictor", "predictor", "1", address, "")
    directory: Any = SimpleNamespace(members=lambda _role: (member,))
    link = PredictorLink(
        directory, "worker", model, lambda: checkpoint_fingerprint(model_path), 1.0, GrpcTransport(), SystemThreads()
    )
    loop = PredictionLoop(engine, table, link, state, 4096, SystemClock().now_s)
    predicting = asyncio.create_task(loop.run())
    turns: list[Turn] = []
    try:
        for number in range((rounds + 1) * len(EVERY)):
            turns.append(await turn(engine, table, state, EVERY[number % len(EVERY)], processes, number))
    finally:
        predicting.cancel()
        await asyncio.gather(predicting, return_exceptions=True)
        await loop.stop()
        await engine.stop()
        predictor.terminate()
    return turns[len(EVERY) :]


def hook_cpu_ms(hidden_size: int) -> float:
    """CPU time of taking one step's rows and making them a message, in a loop of its own: free of the noise of whole
    engines, but also of whatever the rows do to their caches."""
    import torch

    from engine_worker.engines.vllm.hidden_states.capture import HiddenStateCapture, Rows
    from engine_worker.engines.vllm.hidden_states.sender import message_bytes

    runner = SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=[f"turn-1-{row}-0123abcd" for row in range(BATCH)]),
        optimistic_seq_lens_cpu=torch.full((BATCH,), 100, dtype=torch.int32),
        discard_request_mask=SimpleNamespace(np=np.zeros(BATCH, np.bool_)),
    )

    def send(rows: Rows) -> None:
        message_bytes(rows)

    capture = HiddenStateCapture(runner, 1, send)
    states = torch.randn(BATCH, hidden_size)
    before_s = time.process_time()
    for _ in range(HOOK_CALLS):
        capture(None, (None, states), {})
    return 1e3 * (time.process_time() - before_s) / HOOK_CALLS


def report(model: str, turns: list[Turn]) -> dict[str, Any]:
    """Medians over the rounds; each round is compared with itself."""
    rounds = [turns[start : start + len(EVERY)] for start in range(0, len(turns), len(EVERY))]
    cost_ms = {
        name: statistics.median(every.cpu_ms[name] - none.cpu_ms[name] for none, _, every in rounds) for name in PARTS
    }
    step_ms = statistics.median(none.cpu_ms["engine"] for none, _, _ in rounds)
    engine_ms = [every.cpu_ms["engine"] - none.cpu_ms["engine"] for none, _, every in rounds]
    config = json.loads((MODELS / "models" / model / "config.json").read_text())
    hook_ms = hook_cpu_ms(config["hidden_size"])
    quartiles_ms = statistics.quantiles(engine_ms, n=4) if len(rounds) > 1 else engine_ms * 3
    return {
        "model": model,
        "batch_requests": BATCH,
        "rounds": len(rounds),
        "decode_step_cpu_ms": step_ms,
        "prediction_cpu_ms": cost_ms,
        "hook_cpu_ms": hook_ms,
        "hook_at_every_20_percent": 100 * hook_ms / (EVERY[1] * step_ms),
        "engine_quartiles_at_every_20_percent": [
            100 * quartile_ms / (EVERY[1] * step_ms) for quartile_ms in (quartiles_ms[0], quartiles_ms[2])
        ],
        "engine_overhead_percent": {
            str(every): 100 * cost_ms["engine"] / (every * step_ms) for every in (1, 5, 20, 100)
        },
        "all_processes_overhead_percent": {
            str(every): 100 * sum(cost_ms.values()) / (every * step_ms) for every in (1, 5, 20, 100)
        },
        "measured_at_every_20_percent": 100
        * statistics.median(some.cpu_ms["engine"] / none.cpu_ms["engine"] - 1 for none, some, _ in rounds),
        "predictions": sum(turn.predictions for turn in turns),
    }


def main() -> None:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(description="Measure the cost of length prediction per decode step.")
    parser.add_argument("--model", default="demo-large")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = report(arguments.model, asyncio.run(measure(arguments.model, arguments.rounds)))
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
