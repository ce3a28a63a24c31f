"""The environment that vLLM is started in."""

from dataclasses import replace

from engine_worker.engines.vllm.environment import NICENESS_VARIABLE, engine_environment, set_missing
from engine_worker.engines.vllm.settings import VllmSettings

SETTINGS = VllmSettings(model_path="/model", cpu_threads=3)


def test_a_gpu_gets_nothing_that_is_meant_for_the_cpu() -> None:
    variables = engine_environment(SETTINGS, "cuda")
    assert not {"OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_ENABLE_V1_MULTIPROCESSING"} & set(variables)


def test_a_cpu_runs_the_model_in_the_core_process() -> None:
    variables = engine_environment(SETTINGS, "cpu")
    assert variables["OMP_NUM_THREADS"] == "3"
    assert variables[NICENESS_VARIABLE] == "19"
    assert variables["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in engine_environment(replace(SETTINGS, enforce_eager=False), "cpu")
    assert variables["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in engine_environment(replace(SETTINGS, tensor_parallel_size=2), "cpu")


def test_a_step_s_outputs_are_one_slice_however_large_the_batch() -> None:
    for batch in (8, 1024):
        variables = engine_environment(replace(SETTINGS, max_num_seqs=batch), "cuda")
        assert int(variables["VLLM_V1_OUTPUT_PROC_CHUNK_SIZE"]) >= batch


def test_the_operator_s_own_settings_stand() -> None:
    environ = {"OMP_NUM_THREADS": "8"}
    set_missing(environ, {"OMP_NUM_THREADS": "1", "OTHER": "x"})
    assert environ == {"OMP_NUM_THREADS": "8", "OTHER": "x"}


def test_the_model_runner_is_one_whose_rows_can_be_told_apart() -> None:
    for device in ("cpu", "cuda"):
        assert engine_environment(SETTINGS, device)["VLLM_USE_V2_MODEL_RUNNER"] == "0"
