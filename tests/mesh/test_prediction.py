"""Remaining lengths in a running mesh of simulated engines."""

import threading
from typing import Any

from openai import OpenAI

from tests.in_time import eventually
from tests.mesh.running_mesh import RunningMesh


def test_simulated_engines_predict_their_requests_lengths(mesh: RunningMesh) -> None:
    client = OpenAI(base_url=f"{mesh.url}/v1", api_key="none")
    asking = [
        threading.Thread(
            target=client.completions.create,
            kwargs={"model": "demo-large", "prompt": f"tell me {number}", "max_tokens": 60},
        )
        for number in range(6)
    ]
    for thread in asking:
        thread.start()

    def predicted() -> list[dict[str, Any]]:
        return [worker for worker in mesh.status()["prediction"]["workers"] if worker["predictions"]]

    for worker in eventually(predicted, 60, "a worker has predicted lengths"):
        assert worker["source"] == "simulated"
        assert worker["every_steps"] == 20
        assert worker["reason"] == ""
    for thread in asking:
        thread.join(30)
    assert "remaining lengths of demo-large-0, demo-large-1, demo-large-2: simulated" in mesh.cli("status").stdout
    (predictor,) = mesh.status()["prediction"]["predictors"]
    assert predictor["fallback"] == "mean_residual"


def test_engines_that_tell_nothing_are_learnt_from_the_requests_that_end(tmp_path_factory: Any) -> None:
    options = ("--engine-arg", "predict_lengths=false", "--workers", "1", "--rescheduler", "predicted")
    running = RunningMesh(tmp_path_factory.mktemp("mesh"), "--engine", "simulated", *options)
    try:
        running.wait_until_serving()
        (worker,) = running.status()["prediction"]["workers"]
        assert worker["source"] == "mean_residual"
        assert "neither hidden states nor lengths" in worker["reason"]
        client = OpenAI(base_url=f"{running.url}/v1", api_key="none")
        for prompt in ("one", "two"):
            client.completions.create(model="demo-large", prompt=prompt, max_tokens=40)

        def learnt() -> Any:
            client.completions.create(model="demo-large", prompt="three", max_tokens=200)
            (state,) = running.status()["prediction"]["workers"]
            return state["predictions"] and state

        state = eventually(learnt, 60, "a length was predicted from those that had ended")
        assert (state["source"], state["artefact"], state["reason"]) == ("learnt", "demo-large@learnt", "")
        (predictor,) = running.status()["prediction"]["predictors"]
        (lengths,) = predictor["learnt"]
        assert lengths["ended_requests"] >= 2
        assert "demo-large learnt from" in running.cli("status").stdout
        assert running.stop() == 0
    finally:
        running.cut()
