"""A client goes on with its stream over another connection, at this frontend or another one: every byte once."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mesh.membership import Member
from services.cli.usage import each_request_once, read_records
from services.frontend.parser_process.launcher import Launcher
from services.frontend.requests.adoption import Adoption
from services.frontend.requests.api_keys import new_key_line
from services.frontend.requests.models import ModelCatalogue
from services.frontend.requests.resume_ticket import ResumeTicket
from services.frontend.requests.service import FrontendService
from tests.resuming_client import ResumingClient
from tests.unit.engine_worker.worker.test_simulated_worker import MODEL, ROOT, worker_process
from tests.unit.services.frontend.mesh_of_fakes import frontend_between

pytestmark = [pytest.mark.slow, pytest.mark.live]

COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 120, "ignore_eos": True, "temperature": 0}
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell me."}],
    "max_tokens": 60,
    "ignore_eos": True,
    "temperature": 0,
}
SLOW = ("--engine-arg", "time_scale=0.3")


@dataclass
class Pair:
    """Two frontends of one worker."""

    first: httpx.AsyncClient
    second: httpx.AsyncClient


@asynccontextmanager
async def pair(
    *worker_options: str,
    attributes: Mapping[str, str] = MappingProxyType({}),
    make_launcher: Callable[[], Launcher | None] = lambda: None,
    **settings: Any,
) -> AsyncIterator[Pair]:
    """`attributes`: that the worker announces besides."""
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(worker_process(*(worker_options or SLOW)))
        path = str(ROOT / "demo" / "models" / MODEL)
        facts = {"model": MODEL, "model_path": path, "block_tokens": "16", "max_model_len_tokens": "4096"}
        facts |= attributes
        member = Member("worker", "worker-0", await incarnation_of(worker.address), worker.address, "", facts)
        clients = []
        for name in ("frontend-0", "frontend-1"):
            url = await stack.enter_async_context(frontend_between([member], name, make_launcher(), **settings))
            clients.append(await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=30)))
        yield Pair(*clients)


async def incarnation_of(address: str) -> str:
    from mesh.rpc.client import open_channel
    from mesh.runtime import GrpcTransport
    from penstock.v1 import worker_pb2, worker_pb2_grpc

    async with open_channel(GrpcTransport(), address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        return str((await stub.Describe(worker_pb2.DescribeRequest())).instance.incarnation_id)


async def truth(http: httpx.AsyncClient, body: dict[str, Any], path: str) -> Any:
    client = ResumingClient(body, path)
    await client.ask(http)
    return client.answer


CASES = [
    ("/v1/completions", COMPLETION),
    ("/v1/completions", {**COMPLETION, "echo": True, "n": 2, "seed": 3}),
    ("/v1/completions", {**COMPLETION, "prompt": ["Once", "Twice"]}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "n": 3, "seed": 5, "temperature": 1.0}),
]


async def test_a_client_that_comes_back_gets_the_rest_wherever_it_was_cut(tmp_path: Path) -> None:
    """After any number of events, to either frontend, and as often as it likes; its usage counts once."""
    usages = {}
    async with pair(usage_folder=tmp_path) as mesh:
        for path, body in CASES:
            expected = await truth(mesh.first, body, path)
            for cut in (1, 2, 7, 31):
                client = ResumingClient(body, path, {"x-penstock-resumable": "true"})
                await client.ask(mesh.first, cut)
                await client.resume(mesh.second, 9)
                if not client.is_done:
                    await client.resume(mesh.first)
                assert client.answer == expected, (path, cut)
                assert client.heads == (len(expected[0]) if "chat" in path else 0)
                assert client.usage is not None
                usages[client.request_id] = (client.usage["prompt_tokens"], client.usage["completion_tokens"])
    records = list(read_records([tmp_path], []))
    assert len(records) > 2 * len(usages), "each break has left one"
    counted = each_request_once(records)
    assert (
        usages.items()
        <= {request_id: (record.prompt_tokens, record.output_tokens) for request_id, record in counted.items()}.items()
    )
    assert len(counted) == len(usages) + len(CASES), "no others but those that were never cut"


async def test_a_stream_that_is_resumed_ends_once_and_its_tokens_are_not_timed_anew() -> None:
    counted = ("vllm:request_success_total", "vllm:request_time_per_output_token_seconds_count")

    async def counts(http: httpx.AsyncClient) -> dict[str, float]:
        """By metric and, where it has one, the reason of an end; without what is 0."""
        families = text_string_to_metric_families((await http.get("/metrics")).text)
        samples = [each for family in families for each in family.samples if each.name in counted]
        return {each.labels.get("finished_reason", "timed"): each.value for each in samples if each.value}

    async with pair() as mesh:
        client = ResumingClient(COMPLETION, headers={"x-penstock-resumable": "true"})
        await client.ask(mesh.first, 7)
        await client.resume(mesh.second)
        assert client.is_done
        assert await counts(mesh.second) == {"length": 1.0}
        await truth(mesh.first, COMPLETION, "/v1/completions")
        assert await counts(mesh.first) == {"length": 1.0, "timed": 1.0}, "what was cut has not ended"


async def test_a_stream_that_is_resumed_is_charged_to_its_key_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spent: list[int] = []
    monkeypatch.setattr(FrontendService, "spent", lambda _service, _key, tokens: spent.append(tokens))
    async with pair() as mesh:
        for cut in (1, 9, 31):
            spent.clear()
            body = {**COMPLETION, "prompt": [70 + number % 9 for number in range(1000)]}
            client = ResumingClient(body, "/v1/completions", {"x-penstock-resumable": "true"})
            await client.ask(mesh.first, cut)
            await client.resume(mesh.second, 9)
            await client.resume(mesh.first)
            assert client.usage is not None
            taken = client.usage["prompt_tokens"] + client.usage["completion_tokens"]
            # What a break has kept from the client is charged twice at most, its prompt is not.
            assert taken <= sum(spent) < taken + 2 * body["max_tokens"], spent
            assert len(spent) == 3


async def test_a_stream_of_calls_goes_on_with_the_same_calls() -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {**parameters, "required": ["city", "days"]}}}
        for name in ("weather", "tides")
    ]
    body = {**CHAT, "tools": tools, "tool_choice": "required", "max_tokens": 400, "ignore_eos": False}
    async with pair() as mesh:
        expected = await truth(mesh.first, body, "/v1/chat/completions")
        assert expected[1] == {0: "tool_calls"}
        calls = expected[0][0].count("[")
        assert calls > 0
        for cut in (1, 2, 5, 20, 40):
            client = ResumingClient(body, "/v1/chat/completions", {"x-penstock-resumable": "true"})
            await client.ask(mesh.first, cut)
            if not client.is_done:
                await client.resume(mesh.second)
            assert client.answer == expected, cut
            assert len(set(client.call_ids)) == len(client.call_ids) == calls


async def test_stop_strings_end_a_resumed_stream_where_they_would_have_ended_it() -> None:
    async with pair() as mesh:
        texts, _, _ = await truth(mesh.first, COMPLETION, "/v1/completions")
        body = {**COMPLETION, "stop": [texts[0][60:66]]}
        expected = await truth(mesh.first, body, "/v1/completions")
        assert expected[1] == {0: "stop"}
        for cut in (1, 5, 10):
            client = ResumingClient(body, headers={"x-penstock-resumable": "true"})
            await client.ask(mesh.first, cut)
            await client.resume(mesh.second)
            assert client.answer == expected


async def test_every_token_id_of_a_resumed_stream_comes_once() -> None:
    async with pair() as mesh:
        texts, _, _ = await truth(mesh.first, COMPLETION, "/v1/completions")
        body = {
            **COMPLETION,
            "stop": [texts[0][60:66], texts[0][20] + "zz"],
            "return_token_ids": True,
            "n": 2,
            "seed": 1,
        }
        whole = ResumingClient(body)
        await whole.ask(mesh.first)
        assert sum(len(ids) for ids in whole.token_ids.values()) == whole.answer[2]
        for cut in (3, 8, 40):
            client = ResumingClient(body, headers={"x-penstock-resumable": "true"})
            await client.ask(mesh.first, cut)
            await client.resume(mesh.second)
            assert (client.answer, client.token_ids) == (whole.answer, whole.token_ids)


async def test_the_tail_of_a_stream_that_has_just_ended_is_there() -> None:
    async with pair() as mesh:
        for body in (COMPLETION, {**COMPLETION, "stop": ["e"]}):
            whole = ResumingClient(body)
            await whole.ask(mesh.first)
            for event_id in ("", whole.event_ids[0], whole.event_ids[-2], whole.event_ids[-1]):
                late = ResumingClient(body)
                late.request_id, late.last_event_id = whole.request_id, event_id
                await late.resume(mesh.second)
                assert late.is_done
                shown = whole.texts[0]
                assert shown.endswith(late.texts[0])
                if not event_id:
                    assert late.answer == whole.answer
                if event_id.endswith(".u"):
                    assert (late.texts[0], late.usage) == ("", None)


async def test_a_client_that_leaves_without_a_word_is_not_waited_for() -> None:
    async with pair() as mesh:
        client = ResumingClient(COMPLETION)
        await client.ask(mesh.first, 3)
        await asyncio.sleep(0.3)
        response = await mesh.second.get(f"/v1/requests/{client.request_id}/events")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "request_not_found")


async def test_who_resumes_takes_the_stream_from_a_connection_that_is_still_open() -> None:
    async with pair() as mesh:
        expected = await truth(mesh.first, COMPLETION, "/v1/completions")
        client = ResumingClient(COMPLETION)
        body = {**COMPLETION, "stream": True, "stream_options": {"include_usage": True}}
        async with mesh.first.stream("POST", "/v1/completions", json=body) as response:
            client.request_id = response.headers["x-request-id"]
            await client.resume(mesh.second)
            rest = (await response.aread()).decode()
        assert client.answer == expected
        assert "adopted_elsewhere" in rest


async def test_a_frontend_that_still_loads_the_model_goes_on_once_it_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of a lost frontend may come to one that has only just started."""
    is_adopted, loads = asyncio.Event(), itertools.count()
    load, gather = ModelCatalogue._load, Adoption.gather

    async def load_late(self: ModelCatalogue, name: str, member: Member) -> None:
        if next(loads) == 1:  # the second frontend's
            await is_adopted.wait()
        await load(self, name, member)

    async def gather_and_say(self: Adoption, key_name: str) -> ResumeTicket:
        ticket = await gather(self, key_name)
        is_adopted.set()
        return ticket

    monkeypatch.setattr(ModelCatalogue, "_load", load_late)
    monkeypatch.setattr(Adoption, "gather", gather_and_say)
    async with pair() as mesh:
        expected = await truth(mesh.first, COMPLETION, "/v1/completions")
        client = ResumingClient(COMPLETION, headers={"x-penstock-resumable": "true"})
        await client.ask(mesh.first, 3)
        await client.resume(mesh.second)
        assert client.answer == expected


async def test_only_the_key_that_asked_may_resume(tmp_path: Path) -> None:
    keys = {name: new_key_line(name, name.encode() * 8) for name in ("alice", "mallory")}
    path = tmp_path / "keys.txt"
    path.write_text("\n".join(line for _, line in keys.values()))
    alice, mallory = ({"authorization": f"Bearer {keys[name][0]}"} for name in ("alice", "mallory"))
    async with pair(api_keys_file=path) as mesh:
        client = ResumingClient(COMPLETION, headers={**alice, "x-penstock-resumable": "true"})
        await client.ask(mesh.first, 3)
        events = f"/v1/requests/{client.request_id}/events"
        assert (await mesh.second.get(events)).status_code == 401
        assert (await mesh.second.get(events, headers=mallory)).status_code == 404
        await client.resume(mesh.second)
        assert client.is_done


@pytest.mark.parametrize(
    ("event_id", "status"),
    [("x", 400), ("12.3", 400), ("9999", 404), ("1e.u.u", 400), ("-1", 400), ("\u0661", 400)],
)
async def test_an_event_id_of_another_stream_is_refused_and_costs_nothing(event_id: str, status: int) -> None:
    async with pair() as mesh:
        client = ResumingClient(COMPLETION, headers={"x-penstock-resumable": "true"})
        await client.ask(mesh.first, 3)
        headers = [(b"last-event-id", event_id.encode())]
        response = await mesh.second.get(f"/v1/requests/{client.request_id}/events", headers=headers)
        assert (response.status_code, response.json()["error"]["param"]) == (status, "last-event-id")
        await client.resume(mesh.second)
        assert client.is_done
