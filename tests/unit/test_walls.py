"""The walls between the folders, enforced so that no document needs to."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("mesh", "controlplane", "services", "engine_worker", "simulator", "demo", "benchmarks")

PURE = (
    "controlplane/model",
    "controlplane/policies",
    "controlplane/planning",
    "controlplane/prediction",
    "controlplane/protocols",
    "controlplane/recording",
    "simulator/instance",
    "simulator/cost",
    "simulator/cluster",
    "simulator/cascade",
)
"""Decide here: events in, decisions out; time and randomness are arguments."""

PURE_MODULES = ("mesh.errors", "simulator.report.outcome", "simulator.traces.request")
"""Values that pure code shares with folders which also hold I/O."""

SHELLS = (
    "controlplane.scheduler",
    "controlplane.monitor",
    "controlplane.planner",
    "services.frontend",
    "services.cascade",
    "services.predictor",
    "engine_worker",
)
IMPURE_MODULES = frozenset(
    "aetcd aiohttp asyncio fastapi grpc httpx multiprocessing os pathlib penstock prometheus_client random requests "
    "selectors shutil signal socket subprocess sys tempfile threading time torch urllib uvicorn uvloop vllm zmq".split()
)
MAX_MODULE_LINES = 500


def _modules(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "generated" not in path.parts)


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def _in_package(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@pytest.mark.parametrize("folder", PURE)
def test_pure_code_does_no_io(folder: str) -> None:
    for path in _modules(folder):
        impure = {name for name in _imports(path) if name.partition(".")[0] in IMPURE_MODULES}
        assert not impure, f"{path.relative_to(ROOT)} decides, so it may not import {sorted(impure)}"


def test_shared_values_are_pure() -> None:
    for module in PURE_MODULES:
        names = {name.partition(".")[0] for name in _imports(ROOT / (module.replace(".", "/") + ".py"))}
        assert not names & (IMPURE_MODULES | set(PACKAGES)), module


@pytest.mark.parametrize("folder", PURE)
def test_pure_code_imports_pure_code_only(folder: str) -> None:
    pure = tuple(name.replace("/", ".") for name in PURE)
    for path in _modules(folder):
        for name in _imports(path):
            if name.partition(".")[0] in PACKAGES:
                allowed = any(_in_package(name, package) for package in (*pure, *PURE_MODULES))
                assert allowed, f"{path.relative_to(ROOT)} is pure and may not import {name}"


@pytest.mark.parametrize("shell", SHELLS)
def test_nobody_imports_a_shell_but_the_cli(shell: str) -> None:
    own = shell.replace(".", "/")
    for package in PACKAGES:
        for path in _modules(package):
            relative = path.relative_to(ROOT).as_posix()
            if relative.startswith((own, "services/cli", "benchmarks")):
                continue
            imported = {name for name in _imports(path) if _in_package(name, shell)}
            assert not imported, f"{relative} imports {sorted(imported)}, a shell; only the CLI may"


def test_the_frontend_needs_no_torch() -> None:
    for path in _modules("services/frontend"):
        heavy = {name for name in _imports(path) if name.partition(".")[0] in {"torch", "transformers", "vllm"}}
        assert not heavy, f"{path.relative_to(ROOT)} imports {sorted(heavy)}"


def test_policies_know_no_simulator() -> None:
    for folder in ("controlplane", "mesh"):
        for path in _modules(folder):
            if path.is_relative_to(ROOT / "controlplane/planner"):
                continue  # it plans by simulation
            assert not any(_in_package(name, "simulator") for name in _imports(path)), path.relative_to(ROOT)


@pytest.mark.parametrize("package", (*PACKAGES, "scripts", "tests"))
def test_modules_stay_small(package: str) -> None:
    for path in _modules(package):
        lines = len(path.read_text().splitlines())
        assert lines <= MAX_MODULE_LINES, f"{path.relative_to(ROOT)} has {lines} lines; split it by idea"


def test_no_drawers() -> None:
    drawers = {"utils", "helpers", "common", "misc"}
    for package in PACKAGES:
        for path in _modules(package):
            assert path.stem not in drawers, f"{path.relative_to(ROOT)}: name the file for what it is"
