"""Run as a program: starts an engine twice in one process, as a worker would, and tells its children on stdout.

Usage: engine_process.py MODEL_PATH. Prints one JSON object per line, then waits to be killed.
"""

import asyncio
import json
import os
import sys

import psutil

from controlplane.model.request import EngineRequest, SamplingParams
from engine_worker.engines.vllm.engine import VllmEngine
from engine_worker.engines.vllm.settings import VllmSettings


def core_pids() -> list[int]:
    """Children but for the resource tracker of multiprocessing, which ends with this process."""
    children = psutil.Process(os.getpid()).children(recursive=True)
    return [child.pid for child in children if "resource_tracker" not in " ".join(child.cmdline())]


async def main(model_path: str) -> None:
    settings = VllmSettings(model_path=model_path, dtype="float32")
    for life in range(2):
        engine = VllmEngine(settings)
        await engine.start()
        cores = core_pids()
        engine.submit(EngineRequest("one", (5, 6, 7), SamplingParams(max_tokens=900, ignore_eos=True)))
        if life == 0:
            await engine.stop()
            outputs = [step async for step in engine.outputs()]
            reasons = [delta.finish_reason for step in outputs for delta in step.deltas]
            tell(cores=cores, left=core_pids(), reasons=[reason for reason in reasons if reason])
            tell(files=[name for name in os.listdir(os.environ["TMPDIR"]) if name.startswith("penstock-")])
        else:
            tell(cores=cores)
    await asyncio.sleep(600)


def tell(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
