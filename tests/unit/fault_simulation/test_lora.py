"""LoRA adapters in a whole mesh of simulated engines: known to everybody, exact whatever happens."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from engine_worker.settings import WorkerSettings
from fault_simulation.client import ReceivedAnswer, ask
from fault_simulation.http import http_request
from fault_simulation.machines import everybodys_digest
from fault_simulation.nodes import HTTP_PORT, SimulatedMesh
from fault_simulation.oracle import COMPLETIONS_PATH, Oracle
from services.frontend.http.routes_batch import ADAPTER_HEADER
from services.frontend.http.routes_lora import ALIAS_HEADER
from services.frontend.settings import FrontendSettings
from simulator.instance.config import InstanceConfig
from tests.unit.fault_simulation.small_mesh import MODEL, MODEL_PATH, is_as_expected

POET, CRITIC = "/adapters/poet", "/adapters/critic"
WITH_LORA = ("enable_lora=true", "max_loras=2", "max_cpu_loras=3")
FRONTENDS = ("frontend-0", "frontend-1")


def worker(*arguments: str) -> WorkerSettings:
    return WorkerSettings(model=MODEL, model_path=str(MODEL_PATH), engine="simulated", engine_arg=arguments)


def lora_mesh(workers: dict[str, WorkerSettings], *, allows: bool = True) -> SimulatedMesh:
    mesh = SimulatedMesh(1)
    mesh.add_monitor("monitor")
    mesh.add_scheduler("scheduler")
    for name in FRONTENDS:
        mesh.add_frontend(
            name, FrontendSettings(http_host=name, http_port=HTTP_PORT, allow_runtime_lora_updating=allows)
        )
    for name, settings in workers.items():
        mesh.add_worker(name, settings)
    return mesh


def run(mesh: SimulatedMesh, body: Callable[[SimulatedMesh], Awaitable[None]], away: tuple[str, ...] = ()) -> None:
    """Start all but those that are `away`, and do what the test does."""

    async def main() -> None:
        for name in mesh.machines:
            if name not in away:
                mesh.start(name)
        await asyncio.sleep(5)
        await body(mesh)

    mesh.run(main())
    assert not mesh.loop.findings, "\n".join(map(str, mesh.loop.findings))


async def http(
    mesh: SimulatedMesh,
    path: str,
    body: dict[str, Any] | None = None,
    frontend: str = FRONTENDS[0],
    method: str = "",
    **headers: str,
) -> tuple[int, Any]:
    """Status, and the body as JSON or text."""
    sent = b"" if body is None else json.dumps(body).encode()
    method = method or ("GET" if body is None else "POST")
    exchange = http_request(mesh.network, mesh.client, f"{frontend}:{HTTP_PORT}", method, path, headers, sent)
    try:
        status = await exchange.started()
        content = await exchange.body()
    finally:
        exchange.leave()
    is_json = exchange.headers.get("content-type", "").startswith("application/json")
    return status, json.loads(content) if is_json else content.decode()


async def load(mesh: SimulatedMesh, name: str = "poet", path: str = POET, **more: Any) -> tuple[int, Any]:
    return await http(mesh, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **more})


async def unload(mesh: SimulatedMesh, name: str = "poet") -> tuple[int, Any]:
    return await http(mesh, "/v1/unload_lora_adapter", {"lora_name": name})


async def models(mesh: SimulatedMesh, frontend: str = FRONTENDS[0]) -> dict[str, Any]:
    _, listed = await http(mesh, "/v1/models", frontend=frontend)
    return {model["id"]: model for model in listed["data"]}


def body_of(model: str, tokens: int = 60, words: str = "once upon a time " * 8) -> dict[str, Any]:
    """Streamed, with its usage."""
    sampling = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0.0}
    return {"model": model, "prompt": words, "stream": True, "stream_options": {"include_usage": True}, **sampling}


async def complete(mesh: SimulatedMesh, body: dict[str, Any], frontend: str = FRONTENDS[0]) -> ReceivedAnswer:
    return await ask(mesh.network, mesh.client, f"{frontend}:{HTTP_PORT}", COMPLETIONS_PATH, body, {})


def is_of(path: str, answer: ReceivedAnswer, body: dict[str, Any]) -> bool:
    """Whether this is what the model says under the adapter at a path; empty: by itself."""
    known = Oracle(MODEL, MODEL_PATH, InstanceConfig())
    return is_as_expected(answer, known.answer(COMPLETIONS_PATH, body, everybodys_digest(path) if path else ""))


def loaded(mesh: SimulatedMesh, name: str) -> set[str]:
    """Digests, in the engine of a worker."""
    role = mesh.machines[name].life.role  # type: ignore[union-attr]
    report = role.engine.load().adapters  # type: ignore[union-attr]
    return {*report.in_use, *report.idle}


def arrived(mesh: SimulatedMesh, name: str) -> float:
    """KV blocks that came with requests which moved to a worker."""
    life = mesh.machines[name].life
    labels = {"direction": "in"}
    return (life and life.registry.get_sample_value("penstock_worker_migrated_kv_blocks_total", labels)) or 0.0


def test_an_adapter_is_loaded_everywhere_and_is_a_model_of_its_own() -> None:
    mesh = lora_mesh({"a": worker(*WITH_LORA), "b": worker(*WITH_LORA), "plain": worker(), "late": worker(*WITH_LORA)})

    async def body(mesh: SimulatedMesh) -> None:
        assert await load(mesh) == (200, "Success: LoRA adapter 'poet' added successfully.")
        digest = everybodys_digest(POET)
        assert loaded(mesh, "a") == loaded(mesh, "b") == {digest}
        mesh.start("late")
        await asyncio.sleep(3)
        assert loaded(mesh, "late") == {digest}, "one that joins later has it before anybody asks"
        for frontend in FRONTENDS:
            known = await models(mesh, frontend)
            assert (known["poet"]["parent"], known["poet"]["root"]) == (MODEL, POET)
            assert known["poet"]["max_model_len"] == known[MODEL]["max_model_len"]
            assert known[MODEL]["parent"] is None
            for model, path in ((MODEL, ""), ("poet", POET), (MODEL, "")):
                asked = body_of(model)
                answer = await complete(mesh, asked, frontend)
                assert is_of(path, answer, asked), (model, answer)
        tokens = await http(mesh, "/tokenize", {"model": "poet", "prompt": "once"})
        assert tokens[0] == 200
        assert (await unload(mesh)) == (200, "Success: LoRA adapter 'poet' removed successfully.")
        await asyncio.sleep(1)
        assert "poet" not in await models(mesh, FRONTENDS[1])
        assert (await complete(mesh, body_of("poet"), FRONTENDS[1])).status == 404
        assert [loaded(mesh, name) for name in ("a", "b", "late")] == [set(), set(), set()]

    run(mesh, body, away=("late",))


def test_an_adapter_in_place_of_another_shares_nothing_with_it() -> None:
    mesh = lora_mesh({"a": worker(*WITH_LORA)})

    async def body(mesh: SimulatedMesh) -> None:
        assert (await load(mesh))[0] == 200
        asked = body_of("poet")
        assert is_of(POET, await complete(mesh, asked), asked)
        status, refused = await load(mesh, path=CRITIC)
        assert (status, refused["error"]["param"]) == (400, "lora_name")
        assert "has already been loaded" in refused["error"]["message"]
        assert (await load(mesh, path=CRITIC, load_inplace=True))[0] == 200
        answer = await complete(mesh, asked)
        assert is_of(CRITIC, answer, asked)
        await asyncio.sleep(1)
        assert loaded(mesh, "a") == {everybodys_digest(CRITIC)}

    run(mesh, body)


def test_what_no_worker_can_load_is_refused_with_what_each_said_and_leaves_nothing() -> None:
    mesh = lora_mesh({"a": worker(*WITH_LORA), "b": worker(*WITH_LORA)})

    async def body(mesh: SimulatedMesh) -> None:
        for name in ("a", "b"):
            mesh.machines[name].adapters["/nowhere"] = ""
        status, refused = await load(mesh, path="/nowhere")
        assert (status, refused["error"]["param"]) == (404, "lora_path")
        for name in ("a", "b"):
            assert f"{name} says: there is no LoRA adapter at /nowhere" in refused["error"]["message"]
        mesh.machines["b"].adapters[POET] = "b's own"
        status, refused = await load(mesh)
        assert (status, refused["error"]["code"]) == (409, "adapter_conflict")
        assert "b b's own" in refused["error"]["message"]
        assert loaded(mesh, "a") == loaded(mesh, "b") == set()
        assert set(await models(mesh)) == {MODEL}
        mesh.machines["b"].adapters[POET] = ""
        status, text = await load(mesh)
        assert status == 200, "one is enough, and who cannot is told"
        assert text.endswith("successfully. b says: there is no LoRA adapter at /adapters/poet.")
        for _ in range(3):
            asked = body_of("poet")
            assert is_of(POET, await complete(mesh, asked), asked)
        assert loaded(mesh, "b") == set()

    run(mesh, body)


def test_what_is_asked_wrongly_is_named() -> None:
    mesh = lora_mesh({"a": worker(*WITH_LORA), "other": replace(worker(*WITH_LORA), model="other")})

    async def body(mesh: SimulatedMesh) -> None:
        for asked, status, param in (
            ({"lora_path": POET}, 400, "lora_name"),
            ({"lora_name": "poet"}, 400, "lora_path"),
            ({"lora_name": "x" * 257, "lora_path": POET}, 400, "lora_name"),
            ({"lora_name": MODEL, "lora_path": POET}, 400, "lora_name"),
            ({"lora_name": "poet", "lora_path": POET}, 400, "base_model_name"),
            ({"lora_name": "poet", "lora_path": POET, "base_model_name": "none"}, 404, "base_model_name"),
            ({"lora_name": 7, "lora_path": POET}, 400, "lora_name"),
        ):
            got, refused = await http(mesh, "/v1/load_lora_adapter", asked)
            assert (got, refused["error"]["param"]) == (status, param), asked
        assert (await unload(mesh, ""))[0] == 400
        assert (await unload(mesh))[0] == 404
        assert (await load(mesh, base_model_name="other", rank=8))[0] == 200, "as vLLM takes it"
        assert (await models(mesh))["poet"]["parent"] == "other"

    run(mesh, body)


def test_sagemakers_clients_load_an_adapter_ask_for_it_and_unload_it() -> None:
    mesh = lora_mesh({"a": worker(*WITH_LORA)})

    async def body(mesh: SimulatedMesh) -> None:
        for asked, param in (({"name": "poet"}, "src"), ({"name": "", "src": POET}, "name")):
            status, refused = await http(mesh, "/adapters", asked)
            assert (status, refused["error"]["param"]) == (400, param)
        poet = {"name": "poet", "src": POET, "preload": True, "pin": True}
        assert await http(mesh, "/adapters", poet) == (200, "Adapter poet registered")
        status, refused = await http(mesh, "/adapters", poet)
        assert (status, refused["error"]["param"]) == (400, "name"), "it is loaded already"
        for model, identifier, path in ((MODEL, "poet", POET), ("nobody", "poet", POET), ("poet", MODEL, "")):
            asked = body_of(model)
            headers = {ADAPTER_HEADER: identifier}
            address = f"{FRONTENDS[0]}:{HTTP_PORT}"
            answer = await ask(mesh.network, mesh.client, address, "/invocations", asked, headers)
            assert is_of(path, answer, {**asked, "model": identifier}), (model, identifier, answer)
        status, said = await http(mesh, "/adapters/poet", method="DELETE", **{ALIAS_HEADER: "rhymer"})
        assert (status, said) == (200, "Adapter rhymer unregistered")
        assert (await http(mesh, "/adapters/poet", method="DELETE"))[0] == 404

    run(mesh, body)


def test_nobody_loads_where_it_is_not_allowed() -> None:
    mesh = lora_mesh({"a": worker(*WITH_LORA)}, allows=False)

    async def body(mesh: SimulatedMesh) -> None:
        status, refused = await load(mesh)
        assert status == 404
        assert "--allow-runtime-lora-updating" in refused["error"]["message"]
        assert loaded(mesh, "a") == set()

    run(mesh, body)


def test_adapters_that_workers_were_started_with() -> None:
    module = f"lora_modules=poet={POET}"
    mesh = lora_mesh({"a": worker(*WITH_LORA, module), "b": worker(*WITH_LORA, module), "c": worker(*WITH_LORA)})

    async def body(mesh: SimulatedMesh) -> None:
        assert (await models(mesh))["poet"]["parent"] == MODEL
        for _ in range(3):
            asked = body_of("poet")
            assert is_of(POET, await complete(mesh, asked), asked)
        assert (await load(mesh))[0] == 400, "its name is taken"
        status, refused = await unload(mesh)
        assert (status, "lora_modules" in refused["error"]["message"]) == (400, True)
        mesh.machines["b"].adapters[POET] = "trained on"
        mesh.kill("b")
        await asyncio.sleep(1)
        mesh.start("b")
        await asyncio.sleep(8)
        answer = await complete(mesh, body_of("poet"))
        assert answer.status == 409, "nobody knows which of them is meant"
        assert "different LoRA adapters of the name 'poet'" in answer.error
        mesh.kill("b")
        await asyncio.sleep(15)
        asked = body_of("poet")
        assert is_of(POET, await complete(mesh, asked), asked)

    run(mesh, body)


@pytest.mark.parametrize("how", ["kill", "terminate"])
def test_streams_survive_their_worker_under_their_adapters(how: str) -> None:
    mesh = lora_mesh({"a": worker(*WITH_LORA), "b": worker(*WITH_LORA), "c": worker(*WITH_LORA), "plain": worker()})

    async def body(mesh: SimulatedMesh) -> None:
        assert (await load(mesh))[0] == (await load(mesh, "critic", CRITIC))[0] == 200
        asked = [body_of(model, 400) for model in ("poet", "critic", "poet", "critic", MODEL, MODEL)]
        running = [asyncio.ensure_future(complete(mesh, each)) for each in asked]
        await asyncio.sleep(1.0)
        for name in ("a", "b"):
            getattr(mesh, how)(name)
            await asyncio.sleep(0.5)
        assert (await unload(mesh))[0] == 200, "what runs goes on"
        for each, answer in zip(asked, await asyncio.gather(*running), strict=True):
            path = {"poet": POET, "critic": CRITIC}.get(each["model"], "")
            assert is_of(path, answer, each), (each["model"], answer)
        moved = sum(arrived(mesh, name) for name in ("a", "b", "c"))
        assert (moved > 0) == (how == "terminate"), "with their KV, which fits under the same adapter only"

    run(mesh, body)
