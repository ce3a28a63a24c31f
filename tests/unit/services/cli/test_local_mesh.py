from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from controlplane.deployment.gpus import GpuPool
from controlplane.deployment.replicas import cores_of
from engine_worker.checkpoint_fingerprint import checkpoint_fingerprint
from mesh.errors import ConfigurationError
from services.cli.supervisor.deployer import Patience
from services.cli.supervisor.launcher import ProcessSpec
from services.cli.supervisor.local_mesh import (
    DEMO_ENGINE_ARGS,
    DEMO_MODELS,
    DRAIN_S,
    AttachedServer,
    LocalMesh,
    ModelSpec,
    PhaseCounts,
    demo_predictors,
    parse_model,
    processes,
    worker_process,
)
from services.cli.supervisor.planned_run import deployment_of, start_processes
from services.cli.supervisor.supervisor import Supervisor
from services.frontend.settings import FrontendSettings
from services.predictor.artefact import load_artefact


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "own"
    path.mkdir()
    (path / "tokenizer.json").write_text("{}")
    return path


def test_a_model_can_be_named_in_three_ways(checkpoint: Path) -> None:
    assert parse_model(str(checkpoint), 3) == ModelSpec("own", checkpoint, 3)
    assert parse_model(f"mine={checkpoint}", 3) == ModelSpec("mine", checkpoint, 3)
    assert parse_model("demo-small:2", 3) == ModelSpec("demo-small", DEMO_MODELS / "demo-small", 2)


def test_a_hugging_face_model_keeps_its_whole_id_as_its_name(checkpoint: Path) -> None:
    asked: list[str] = []

    def locate(source: str) -> Path:
        asked.append(source)
        return checkpoint

    named = parse_model("mine=Qwen/Qwen3-0.6B@main", 1, locate=locate)
    model = parse_model("Qwen/Qwen3-0.6B:2", 1, locate=locate)
    assert (named, model) == (ModelSpec("mine", checkpoint, 1), ModelSpec("Qwen/Qwen3-0.6B", checkpoint, 2))
    assert asked == ["Qwen/Qwen3-0.6B@main", "Qwen/Qwen3-0.6B"]
    specs = processes(LocalMesh((model,), "simulated", (), "embedded:", "127.0.0.1", 8000))
    names = [spec.name for spec in specs if spec.role == "worker"]
    assert names == ["Qwen--Qwen3-0.6B-0", "Qwen--Qwen3-0.6B-1"], "an id of an instance holds no slash"
    mesh = LocalMesh((model,), "simulated", (), "embedded:", "127.0.0.1", 8000)
    planned = deployment_of("here", mesh, GpuPool(0), Patience(60.0, 60.0))
    assert [replica.name for replica in planned.replicas] == names, "whoever scales it finds them"


@pytest.mark.parametrize("text", ["nowhere", "mine=nowhere", "nowhere:2"])
def test_a_missing_model_is_a_clear_error(text: str) -> None:
    with pytest.raises(ConfigurationError, match="no model at"):
        parse_model(text, 1)


@pytest.mark.parametrize("workers", [0, 1000])
def test_the_number_of_instances_is_bounded(checkpoint: Path, workers: int) -> None:
    with pytest.raises(ConfigurationError, match="instances asked for"):
        parse_model(f"{checkpoint}:{workers}", 1)


def test_a_mesh_has_every_role_once_and_all_its_workers(checkpoint: Path) -> None:
    models = (ModelSpec("a", checkpoint, 2), ModelSpec("b", checkpoint, 1))
    specs = processes(LocalMesh(models, "simulated", ("kv_blocks=9",), "embedded:", "127.0.0.1", 8000))
    names = [spec.name for spec in specs]
    assert len(set(names)) == len(names)
    assert [spec.name for spec in specs if spec.role == "worker"] == ["a-0", "a-1", "b-0"]
    others = sorted(spec.role for spec in specs if spec.role != "worker")
    assert others == ["cascade", "frontend", "monitor", "planner", "predictor", "scheduler"]
    for spec in specs:
        assert ("kv_blocks=9" in spec.arguments) == (spec.role == "worker")


def test_every_worker_gets_the_options_of_workers(checkpoint: Path) -> None:
    models = (ModelSpec("a", checkpoint, 1),)
    told = ("--generation-config", "vllm")
    traced = ("--otlp-traces-endpoint", "http://127.0.0.1:4318/v1/traces")
    mesh = LocalMesh(
        models, "simulated", (), "embedded:", "127.0.0.1", 8000, worker_options=told, traced_options=traced
    )
    for spec in processes(mesh):
        assert (traced[0] in spec.arguments) == (spec.role in ("frontend", "worker"))
        assert ("--generation-config" in spec.arguments) == (spec.role == "worker")


def test_control_roles_may_run_several_times(checkpoint: Path) -> None:
    models = (ModelSpec("a", checkpoint, 1),)
    counts = {"frontends": 2, "schedulers": 2, "monitors": 2}
    mesh = LocalMesh(models, "simulated", (), "embedded:", "127.0.0.1", 8000, **counts)
    specs = {spec.name: spec for spec in processes(mesh)}
    for role in ("frontend", "scheduler", "monitor"):
        assert sorted(name for name, spec in specs.items() if spec.role == role) == [f"{role}-0", f"{role}-1"]
    assert [
        specs[f"frontend-{index}"].arguments[specs[f"frontend-{index}"].arguments.index("--drain-s") + 1]
        for index in (0, 1)
    ] == ["600", "600"]
    assert [specs[f"frontend-{index}"].arguments[-1] for index in (0, 1)] == ["8000", "8001"]


def test_frontends_that_share_a_port_have_their_own_behind_it(checkpoint: Path) -> None:
    model = ModelSpec("a", checkpoint, 1)
    mesh = LocalMesh((model,), "simulated", (), "embedded:", "127.0.0.1", 8000, frontends=2, shares_port=True)
    told = [spec.arguments for spec in processes(mesh) if spec.role == "frontend"]
    options = ("--http-port", "--shared-http-port")
    ports = [tuple(each[each.index(option) + 1] for option in options) for each in told]
    assert ports == [("8001", "8000"), ("8002", "8000")]


@pytest.mark.parametrize(
    ("counts", "port", "message"),
    [({"frontends": 0}, 8000, "--frontends 0: 1 to"), ({"schedulers": 99}, 8000, "--schedulers 99: 1 to"),
     ({"frontends": 2}, 65535, "ports end at 65535"),
     ({"frontends": 1, "shares_port": True}, 65535, "ports end at 65535")],
)  # fmt: skip
def test_too_many_or_too_few_of_a_role_are_a_clear_error(counts: Any, port: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LocalMesh((), "simulated", (), "embedded:", "127.0.0.1", port, **counts)


def test_every_worker_is_told_how_long_to_drain_and_by_default_no_request_outlives_it(checkpoint: Path) -> None:
    model = ModelSpec("a", checkpoint, 1, PhaseCounts(1, 1))
    mesh = LocalMesh((model,), "simulated", (), "embedded:", "127.0.0.1", 8000)
    workers = [spec for spec in processes(mesh) if spec.role == "worker"]
    assert len(workers) == 3
    for spec in (*workers, worker_process(mesh, "a", "a-7", (1, 1))):
        assert spec.arguments[spec.arguments.index("--drain-s") + 1] == "600"
    assert FrontendSettings().request_deadline_s <= DRAIN_S


def test_instances_for_one_phase_stand_beside_the_others(checkpoint: Path) -> None:
    model = parse_model(f"mine={checkpoint}:1", 3, PhaseCounts(prefill=2, decode=1))
    assert model.instances == 4
    specs = processes(LocalMesh((model,), "simulated", (), "embedded:", "127.0.0.1", 8000))
    phase_of = {
        spec.name: spec.arguments[spec.arguments.index("--phase") + 1] if "--phase" in spec.arguments else "any"
        for spec in specs
        if spec.role == "worker"
    }
    assert phase_of == {
        "mine-0": "any",
        "mine-prefill-0": "prefill",
        "mine-prefill-1": "prefill",
        "mine-decode-0": "decode",
    }
    assert parse_model(str(checkpoint), 0, PhaseCounts(1, 1)).instances == 2
    with pytest.raises(ConfigurationError, match="0 or more"):
        PhaseCounts(prefill=-1)


def test_the_predictor_serves_the_artefacts_it_is_given(checkpoint: Path, tmp_path: Path) -> None:
    folders = (tmp_path / "one", tmp_path / "two")
    mesh = LocalMesh((ModelSpec("a", checkpoint, 1),), "vllm", (), "embedded:", "127.0.0.1", 8000, folders)
    (predictor,) = (spec for spec in processes(mesh) if spec.role == "predictor")
    assert predictor.arguments[-4:] == ("--artefact", str(folders[0]), "--artefact", str(folders[1]))


def test_demo_models_bring_their_predictors(checkpoint: Path) -> None:
    demo, own = parse_model("demo-large", 1), ModelSpec("own", checkpoint, 1)
    (folder,) = demo_predictors((demo, own, demo))
    artefact = load_artefact(folder)
    artefact.check_model("demo-large", checkpoint_fingerprint(demo.path), 256)


@pytest.mark.parametrize(
    ("engine", "model", "asked", "expected"),
    [
        ("vllm", "demo-small", (), DEMO_ENGINE_ARGS),
        ("vllm", "demo-small", ("dtype=float32",), (*DEMO_ENGINE_ARGS, "dtype=float32")),
        ("vllm", "demo-small", ("structured_outputs=false",), ("structured_outputs=false",)),
        ("vllm", "own", (), ()),
        ("simulated", "demo-small", (), ()),
    ],
)
def test_demo_models_are_kept_from_writing_blanks_for_ever(
    checkpoint: Path, engine: str, model: str, asked: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    spec = parse_model(str(checkpoint) if model == "own" else model, 1)
    mesh = LocalMesh((spec,), engine, asked, "embedded:", "127.0.0.1", 8000)
    worker = next(spec for spec in processes(mesh) if spec.role == "worker")
    given = zip(worker.arguments, worker.arguments[1:], strict=False)
    assert tuple(value for name, value in given if name == "--engine-arg") == expected


def test_parsers_are_of_every_model_or_of_one(checkpoint: Path) -> None:
    models = parse_model(f"a={checkpoint}", 1), parse_model(f"b={checkpoint}", 1)
    mesh = LocalMesh(
        models,
        "simulated",
        (),
        "embedded:",
        "127.0.0.1",
        8000,
        tool_call_parsers=("hermes", "b=llama3_json"),
        reasoning_parsers=("b=qwen3",),
    )
    first, second = (spec.arguments for spec in processes(mesh) if spec.role == "worker")
    assert ("--tool-call-parser", "hermes") in pairwise(first)
    assert "--reasoning-parser" not in first
    assert ("--tool-call-parser", "llama3_json") in pairwise(second)
    assert ("--reasoning-parser", "qwen3") in pairwise(second)
    with pytest.raises(ConfigurationError, match="given for 'c'"):
        replace(mesh, reasoning_parsers=("c=qwen3",))


async def test_each_own_instance_gets_gpus_for_all_of_its_cores_and_no_other_process_any(checkpoint: Path) -> None:
    started: dict[str, Mapping[str, str]] = {}

    class Started:
        async def add(self, spec: ProcessSpec) -> None:
            started[spec.name] = spec.environment

    degrees = ("tensor_parallel_size=2", "data_parallel_size=2")
    mesh = LocalMesh(
        (ModelSpec("a", checkpoint, 2),),
        "vllm",
        degrees,
        "embedded:",
        "127.0.0.1",
        8000,
        attached=(AttachedServer("http://127.0.0.1:9"),),
    )
    await start_processes(mesh, cast(Supervisor, Started()), GpuPool(8, cores=cores_of(degrees)))
    with_gpus = {name: environment for name, environment in started.items() if environment}
    assert with_gpus == {"a-0": {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, "a-1": {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}}
    assert "attached-0" in started
    with pytest.raises(ConfigurationError, match="a-1 needs 4 of 7 GPUs here, of which 3 are free"):
        await start_processes(mesh, cast(Supervisor, Started()), GpuPool(7, cores=2))
