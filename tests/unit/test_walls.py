"""The walls between the folders, enforced so that no document needs to."""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "mesh",
    "controlplane",
    "services",
    "engine_worker",
    "simulator",
    "demo",
    "fault_simulation",
    "benchmarks",
    "penstock",
)

PURE = (
    "controlplane/deployment",
    "controlplane/model",
    "controlplane/policies",
    "controlplane/planning",
    "controlplane/prediction",
    "controlplane/protocols",
    "controlplane/recording",
    "simulator/instance",
    "simulator/cost",
    "simulator/cluster",
    "simulator/autoscale",
    "simulator/cascade",
)
"""Decide here: events in, decisions out; time and randomness are arguments."""

PURE_MODULES = (
    "mesh.backoff",
    "mesh.errors",
    "mesh.exit_status",
    "mesh.invariants",
    "mesh.plugins",
    "simulator.report.interval",
    "simulator.report.outcome",
    "simulator.traces.request",
)
"""What pure code shares with folders which also hold I/O: values, and the look-up of installed plugins, which is no
more I/O than an import is."""

SHELLS = (
    "controlplane.scheduler",
    "controlplane.monitor",
    "controlplane.planner",
    "services.frontend",
    "services.cascade",
    "services.predictor",
    "services.parser",
    "engine_worker",
)
IMPURE_MODULES = frozenset(
    "aetcd aiohttp asyncio fastapi grpc httpx multiprocessing os pathlib penstock prometheus_client random requests "
    "selectors shutil signal socket subprocess sys tempfile threading time torch urllib uvicorn uvloop vllm zmq".split()
)
MAX_MODULE_LINES = 500


@cache
def _modules(folder: str) -> tuple[Path, ...]:
    return tuple(sorted(path for path in (ROOT / folder).rglob("*.py") if "generated" not in path.parts))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    """Imports and definitions, anywhere in a module."""
    kinds = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return tuple(node for node in ast.walk(_tree(path)) if isinstance(node, kinds))


@cache
def _imports(path: Path) -> frozenset[str]:
    found: set[str] = set()
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return frozenset(found)


def _in_package(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@pytest.mark.parametrize("folder", PURE)
def test_pure_code_does_no_io(folder: str) -> None:
    for path in _modules(folder):
        impure = {name for name in _imports(path) if name.partition(".")[0] in IMPURE_MODULES}
        assert not impure, f"{path.relative_to(ROOT)} decides, so it may not import {sorted(impure)}"


def test_shared_values_are_pure() -> None:
    for module in PURE_MODULES:
        names = _imports(ROOT / (module.replace(".", "/") + ".py")).difference(PURE_MODULES)
        assert not {name.partition(".")[0] for name in names} & (IMPURE_MODULES | set(PACKAGES)), module


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
            if relative.startswith((own, "services/cli", "benchmarks", "fault_simulation", "penstock")):
                continue
            imported = {name for name in _imports(path) if _in_package(name, shell)}
            assert not imported, (
                f"{relative} imports {sorted(imported)}, a shell; only the CLI, the simulation and the suites of it may"
            )


def test_nobody_imports_the_fault_simulation_but_the_cli() -> None:
    for package in PACKAGES:
        for path in _modules(package):
            relative = path.relative_to(ROOT).as_posix()
            if not relative.startswith(("fault_simulation", "services/cli")):
                imported = {name for name in _imports(path) if _in_package(name, "fault_simulation")}
                assert not imported, f"{relative} imports {sorted(imported)}; only the CLI may"


def _circle(arrows: dict[str, frozenset[str]]) -> list[str]:
    """Some modules that import each other in a circle, the first one again at the end; empty: there are none."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for imported in sorted(arrows[module]):
            if circle := visit(imported, [*path, module]):
                return circle
        done.add(module)
        return []

    return next((circle for module in sorted(arrows) if (circle := visit(module, []))), [])


def _imported_modules(path: Path, modules: Mapping[str, Path]) -> frozenset[str]:
    """Those of `modules` that a module names: anywhere in it, and for type checkers alone, too."""
    found: set[str] = set()
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(names if names <= modules.keys() else {*names, node.module})
    return frozenset(found & modules.keys())


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Nor for type checkers alone: two modules that need each other's types are one idea, or an arrow points the wrong
    way. (Python does not mind such a circle, a reader who looks for the beginning does.)"""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in PACKAGES
        for path in _modules(package)
    }
    assert _circle({name: _imported_modules(path, modules) for name, path in modules.items()}) == []


@pytest.mark.parametrize(
    ("arrows", "circle"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b", "c"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, ["b", "c", "b"]),
        ({"a": {"a"}}, ["a", "a"]),
    ],
)
def test_circles_are_found(arrows: dict[str, set[str]], circle: list[str]) -> None:
    assert _circle({module: frozenset(imported) for module, imported in arrows.items()}) == circle


FRONTEND_ROOMS = (
    "gateway",
    "role",
    "status_servicer",
    "http",
    "console",
    "cascade",
    "pooling",
    "answers",
    "requests",
    "media",
    "placement",
    "workers",
    "parser_process",
    "text",
    "parsers",
    "mesh_metrics",
    "metrics",
    "errors",
    "settings",
)
"""From the top to the bottom."""


def _up_arrows(imports: dict[str, set[str]], rooms: tuple[str, ...]) -> list[str]:
    """Imports from a room of one above it; `imports`: of each module, all names below the package."""
    rank = {room: place for place, room in enumerate(rooms)}
    arrows = ((module, name) for module, names in sorted(imports.items()) for name in sorted(names))
    return [
        f"{module} -> {name}"
        for module, name in arrows
        if rank[name.partition(".")[0]] < rank[module.partition(".")[0]]
    ]


def test_the_frontend_imports_in_one_direction() -> None:
    package = "services.frontend"
    imports = {
        path.relative_to(ROOT / "services/frontend").with_suffix("").as_posix().replace("/", "."): {
            name.removeprefix(package + ".") for name in _imports(path) if name.startswith(package + ".")
        }
        for path in _modules("services/frontend")
        if path.name != "__init__.py"
    }
    assert _up_arrows(imports, FRONTEND_ROOMS) == []


def test_an_arrow_that_runs_up_is_found() -> None:
    imports = {"text.words": {"text.split_points", "errors"}, "workers.link": {"placement.client"}}
    assert _up_arrows(imports, FRONTEND_ROOMS) == ["workers.link -> placement.client"]


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


SEAMED = ("mesh", "controlplane", "services/frontend", "services/cascade", "services/predictor", "engine_worker")
"""Roles, the supervisor and what both are made of: a simulation runs them on its own time, chance, threads and
network (see `mesh/runtime.py`). The rest of the command line runs in a process of its own only."""

SEAM_EXEMPTIONS = {
    "mesh/runtime.py": "it is the seam",
    "mesh/identity/tls.py": "the same transport with certificates",
    "engine_worker/engines/vllm": "an engine on real hardware, with processes and threads of its own",
    "engine_worker/host_tier/shared_memory.py": "memory that processes share, which another one takes the place of",
    "engine_worker/kv/ucx_worker.py": "a fabric on a real network, which another one takes the place of",
    "controlplane/planner/own_process.py": "a process, which another `PlanMaker` or `CapacityMaker` takes the place of",
    "services/cli/supervisor/launcher.py": "processes, which another `Launcher` takes the place of",
    "services/frontend/parser_process/launcher.py": "a process, which another `Launcher` takes the place of",
}
SEAM_MODULES = frozenset({"time", "secrets", "uuid", "threading", "multiprocessing", "concurrent"})
SEAM_CALLS = frozenset(
    {
        *("os.urandom", "asyncio.to_thread", "asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell"),
        *("datetime.now", "datetime.utcnow", "datetime.today", "date.today"),
        *("aio.insecure_channel", "aio.secure_channel", "aio.server", "grpc.insecure_channel", "grpc.secure_channel"),
    }
)
"""The last two names of what may not be referred to."""


def _seam_breaks(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what is used) for all that the roles take from the machine by themselves."""
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            names = []
        for name in names:
            if name.partition(".")[0] in SEAM_MODULES or name.startswith("random.") or name in SEAM_CALLS:
                yield node.lineno, name
        if isinstance(node, ast.Attribute):
            chain = ast.unparse(node)
            call = called.get(id(node))
            is_random = chain.startswith("random.") and (chain != "random.Random" or call is not None)
            is_numpy = chain.startswith(("np.random.", "numpy.random.")) and not chain.endswith(".Generator")
            is_seeded = call is not None and chain.endswith(".default_rng") and bool(call.args)
            is_pool = node.attr == "run_in_executor"
            if is_random or (is_numpy and not is_seeded) or is_pool or ".".join(chain.split(".")[-2:]) in SEAM_CALLS:
                yield node.lineno, chain


@pytest.mark.slow
@pytest.mark.parametrize("folder", (*SEAMED, "services/cli/supervisor"))
def test_roles_take_time_chance_threads_and_network_from_outside(folder: str) -> None:
    breaks = []
    for path in _modules(folder):
        relative = path.relative_to(ROOT).as_posix()
        if not relative.startswith(tuple(SEAM_EXEMPTIONS)):
            breaks += [f"{relative}:{line} {name}" for line, name in _seam_breaks(_tree(path))]
    assert not breaks, "take it from the role's Runtime (mesh/runtime.py): " + ", ".join(breaks)


@pytest.mark.parametrize(
    ("source", "broken"),
    [
        ("import time", "time"),
        ("from time import perf_counter", "time"),
        ("import concurrent.futures", "concurrent.futures"),
        ("from asyncio import to_thread", "asyncio.to_thread"),
        ("import random\nrandom.random()", "random.random"),
        ("import random\nrandom.Random(1)", "random.Random"),
        ("from random import Random", "random.Random"),
        ("np.random.default_rng()", "np.random.default_rng"),
        ("asyncio.to_thread(f)", "asyncio.to_thread"),
        ("asyncio.get_running_loop().run_in_executor(None, f)", "asyncio.get_running_loop().run_in_executor"),
        ("datetime.now()", "datetime.now"),
        ("grpc.aio.insecure_channel('a')", "grpc.aio.insecure_channel"),
        ("def f(rng: random.Random) -> None: ...", ""),
        ("import random\nnp.random.default_rng(seed)", ""),
        ("clock.now_s(); threads.run(f); asyncio.sleep(1)", ""),
    ],
)
def test_the_wall_of_the_seams_has_no_holes(source: str, broken: str) -> None:
    assert next((name for _, name in _seam_breaks(ast.parse(source))), "") == broken


PRIVATE_WORDS = frozenset(
    "ascent ascents blow blows book borders desk falls fate fates foretell foretold foretells hub hubs lane lanes "
    "lived office remarks scene shelf shortfall surroundings tap told walk workplace".split()
)
"""Words that needed a guide; the glossary in docs/architecture.md has what to say instead."""
PRIVATE_PHRASES = ("last words", "left out", "side by side", "own mesh")


def _words_of(name: str) -> str:
    return " ".join(re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)).lower()


def _names_in(path: Path) -> Iterator[str]:
    yield path.stem
    for node in _nodes(path):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


def _private_words(name: str) -> list[str]:
    words = _words_of(name)
    return sorted(PRIVATE_WORDS.intersection(words.split())) + [each for each in PRIVATE_PHRASES if each in words]


def test_private_words_are_found() -> None:
    assert _private_words("PlacementDesk") == ["desk"]
    assert _private_words("_tier_falls") == ["falls"]
    assert _private_words("last_words") == ["last words"]
    assert _private_words("KVHub") == ["hub"]
    assert _private_words("_fall_back") == []


@pytest.mark.parametrize("package", PACKAGES)
def test_names_are_in_plain_english(package: str) -> None:
    for path in _modules(package):
        relative = path.relative_to(ROOT).as_posix()
        for name in _names_in(path):
            assert not _private_words(name), (
                f"{relative}: {name} has {_private_words(name)}; the glossary in docs/architecture.md has better words"
            )
