from pathlib import Path

import pytest

from mesh.errors import ConfigurationError
from services.cli.supervisor.local_mesh import DEMO_MODELS, LocalMesh, ModelSpec, parse_model, processes


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
