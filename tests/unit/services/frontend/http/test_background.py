"""Responses in the background: any frontend answers for them, and the loss of one loses none."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from mesh.membership import Member
from penstock.v1 import request_pb2, worker_pb2
from tests.unit.engine_worker.worker.test_simulated_worker import MODEL, ROOT, worker_process
from tests.unit.services.frontend.fakes import Delta, failure
from tests.unit.services.frontend.http.test_resume import incarnation_of
from tests.unit.services.frontend.mesh_of_fakes import MeshOfFakes, mesh_of_fakes

RESPONSES = "/v1/responses"
BODY: dict[str, Any] = {"model": "demo", "input": "hi", "background": True}
TEXT = "the quick fox"
UNFINISHED = frozenset(("queued", "in_progress"))

pytestmark = [pytest.mark.slow, pytest.mark.live]


@dataclass
class Paused:
    """A script whose requests get tokens when the test says so."""

    mesh: MeshOfFakes | None = None
    asked: list[request_pb2.GenerateRequest] = field(default_factory=list)
    said: dict[str, int] = field(default_factory=dict)
    """Tokens, by request."""

    def __call__(self, request: request_pb2.GenerateRequest) -> list[Delta]:
        self.asked.append(request)
        return []

    def say(self, delta: Delta, place: int = -1) -> None:
        """Of the request at that place."""
        assert self.mesh is not None
        request = self.asked[place]
        delta.request_id, delta.epoch = request.request_id, request.epoch
        delta.offset = self.said.get(request.request_id, 0)
        self.said[request.request_id] = delta.offset + len(delta.token_ids)
        self.mesh.worker.say(worker_pb2.WorkerMessage(step=worker_pb2.StepOutput(deltas=[delta])))

    def begin(self, place: int = -1) -> None:
        """Say the first token."""
        assert self.mesh is not None
        self.say(Delta(token_ids=self.mesh.ids(TEXT)[:1], cached_tokens=0), place)

    def finish(self, place: int = -1) -> None:
        """Say the rest at once."""
        assert self.mesh is not None
        rest = [*self.mesh.ids(TEXT), 1][self.said.get(self.asked[place].request_id, 0) :]
        self.say(Delta(token_ids=rest, finish_reason=request_pb2.FINISH_REASON_STOP), place)


@asynccontextmanager
async def paused_mesh(
    model_path: Path, member_id: str = "frontend-0", **settings: Any
) -> AsyncIterator[tuple[MeshOfFakes, Paused]]:
    script = Paused()
    async with mesh_of_fakes(model_path, member_id=member_id, **settings) as mesh:
        script.mesh = mesh
        await mesh.add_worker(script)
        yield mesh, script
        mesh.role.validate()


@pytest_asyncio.fixture
async def paused(model_path: Path) -> AsyncIterator[tuple[MeshOfFakes, Paused]]:
    async with paused_mesh(model_path) as pair:
        yield pair


def member(of: MeshOfFakes, member_id: str) -> Member:
    return Member("frontend", member_id, "first", of.rpc_address, "")


async def promised_by(mesh: MeshOfFakes, script: Paused, **extra: Any) -> Any:
    """A response in the background that the worker has by now."""
    before = len(script.asked)
    made = await mesh.client().responses.create(**BODY, **extra)
    await mesh.worker.wait_until(lambda: len(script.asked) > before)
    return made


async def state(mesh: MeshOfFakes, response_id: str) -> Any:
    async with mesh.http() as http:
        return (await http.get(f"{RESPONSES}/{response_id}")).json()


async def ended(mesh: MeshOfFakes, response_id: str) -> Any:
    """The response at its end, from this frontend."""
    async with asyncio.timeout(20):
        while (told := await state(mesh, response_id)).get("status") in UNFINISHED:  # noqa: ASYNC110 - of another part
            await asyncio.sleep(0.005)
    return told


def text_of(response: Any) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))


@dataclass
class Events:
    """What a stream has said."""

    seen: list[Any] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(each["delta"] for each in self.seen if each["type"] == "response.output_text.delta")

    @property
    def response_id(self) -> str:
        return str(self.seen[0]["response"]["id"])

    async def read(self, response: httpx.Response, until: int | None = None) -> None:
        """All of it, or so many events in all."""
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                self.seen.append(json.loads(line.removeprefix("data: ")))
                if len(self.seen) == until:
                    return

    async def ask(self, mesh: MeshOfFakes, until: int | None = None, **body: Any) -> None:
        async with mesh.http() as http, http.stream("POST", RESPONSES, json={**BODY, "stream": True, **body}) as answer:
            await self.read(answer, until)

    async def begin(self, mesh: MeshOfFakes, script: Paused) -> None:
        """The first five, of a stream that has one token."""
        before = len(script.asked)
        asking = asyncio.create_task(self.ask(mesh, 5))
        await mesh.worker.wait_until(lambda: len(script.asked) > before)
        script.begin()
        await asking

    async def go_on(self, mesh: MeshOfFakes, until: int | None = None) -> None:
        """With what comes behind the last event."""
        path = f"{RESPONSES}/{self.response_id}?stream=true&starting_after={self.seen[-1]['sequence_number']}"
        async with mesh.http() as http, http.stream("GET", path) as answer:
            assert answer.status_code == 200, await answer.aread()
            await self.read(answer, until)


async def test_a_response_is_promised_at_once_and_made_meanwhile(paused: tuple[MeshOfFakes, Paused]) -> None:
    mesh, script = paused
    client = mesh.client()
    promised = await promised_by(mesh, script, metadata={"for": "ann"})
    assert (promised.status, promised.output, promised.background, promised.usage) == ("queued", [], True, None)
    assert promised.max_output_tokens == 4096 - len(script.asked[0].prompt_token_ids), "as of what is left"
    assert mesh.metric("background_responses") == 1
    now = await client.responses.retrieve(promised.id)
    assert (now.status, now.output, now.metadata) == ("in_progress", [], {"for": "ann"})
    with pytest.raises(openai.BadRequestError, match="is in_progress: go on with it once it has ended"):
        await client.responses.create(model="demo", input="again", previous_response_id=promised.id)
    script.finish()
    made = await ended(mesh, promised.id)
    assert (made["status"], text_of(made), made["created_at"]) == ("completed", TEXT, int(promised.created_at))
    assert made["usage"]["output_tokens"] == len(mesh.ids(TEXT)) + 1
    next_one = await promised_by(mesh, script, previous_response_id=promised.id)
    prompt = mesh.text.decode(script.asked[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt == f"<s><|user|>hi<|assistant|>{TEXT}<|user|>hi<|assistant|>"
    script.finish()
    assert (await ended(mesh, next_one.id))["previous_response_id"] == promised.id
    assert mesh.metric("background_responses") == 0


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"store": False}, 400, "background"),
        ({"input": "a " * 5000}, 400, "messages"),
        ({"model": "nobody"}, 404, "model"),
        ({"temperature": 3}, 400, "temperature"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
    ],
)
async def test_what_cannot_be_served_is_refused_and_not_promised(
    paused: tuple[MeshOfFakes, Paused], fields: dict[str, Any], status: int, param: str
) -> None:
    mesh, script = paused
    async with mesh.http() as http:
        answer = await http.post(RESPONSES, json={**BODY, **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
        assert answer.headers["x-request-id"]
    assert not script.asked
    assert len(mesh.service.responses.store) == 0
    await mesh.until(lambda: mesh.metric("background_responses") == 0)


async def test_a_response_that_cannot_be_made_has_failed(paused: tuple[MeshOfFakes, Paused]) -> None:
    mesh, script = paused
    promised = await promised_by(mesh, script)
    script.say(failure(request_pb2.ERROR_CODE_REFUSED, "the engine does not like it"))
    made = await ended(mesh, promised.id)
    assert (made["status"], made["error"]["code"]) == ("failed", "server_error")
    assert "does not like it" in made["error"]["message"]
    events = Events()
    asking = asyncio.create_task(events.ask(mesh))
    await mesh.worker.wait_until(lambda: len(script.asked) == 2)
    script.say(failure(request_pb2.ERROR_CODE_REFUSED, "nor this one"))
    await asking
    assert [each["type"] for each in events.seen] == ["response.created", "response.in_progress", "response.failed"]
    assert events.seen[-1]["response"] == await state(mesh, events.response_id)


async def test_a_response_is_cancelled_once_and_a_deleted_one_is_gone(paused: tuple[MeshOfFakes, Paused]) -> None:
    mesh, script = paused
    client = mesh.client()
    first, second = [await promised_by(mesh, script) for _ in range(2)]
    for _ in range(2):
        cancelled = await client.responses.cancel(first.id)
        assert (cancelled.id, cancelled.status, cancelled.output) == (first.id, "cancelled", [])
    assert (await state(mesh, first.id))["status"] == "cancelled"
    await client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(second.id)
    await mesh.until(lambda: set(mesh.worker.aborted) == {each.request_id for each in script.asked})
    third = await promised_by(mesh, script)
    script.finish()
    await ended(mesh, third.id)
    assert (await client.responses.cancel(third.id)).status == "completed", "it has ended"
    whole = asyncio.create_task(client.responses.create(model="demo", input="hi"))
    await mesh.worker.wait_until(lambda: len(script.asked) == 4)
    script.finish()
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        await client.responses.cancel((await whole).id)


async def test_a_stream_is_made_on_while_its_client_is_away(paused: tuple[MeshOfFakes, Paused]) -> None:
    mesh, script = paused
    events = Events()
    await events.begin(mesh, script)
    script.finish()
    await ended(mesh, events.response_id)
    await events.go_on(mesh)
    assert [each["sequence_number"] for each in events.seen] == list(range(len(events.seen)))
    assert (events.text, events.seen[-1]["type"]) == (TEXT, "response.completed")
    assert events.seen[-1]["response"] == await state(mesh, events.response_id)
    again = Events()
    async with mesh.http() as http:
        path = f"{RESPONSES}/{events.response_id}"
        await again.read(await http.get(path, params={"stream": "true"}))
        assert again.seen == events.seen
        assert (await http.get(path, params={"stream": "true", "starting_after": "999"})).text == ""
        for name, wrong in (("stream", "yes"), ("starting_after", "-1"), ("starting_after", "x")):
            answer = await http.get(path, params={"stream": "true", name: wrong})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
        whole = await mesh.client().responses.create(**BODY)
        answer = await http.get(f"{RESPONSES}/{whole.id}", params={"stream": "true"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream"), "it was not asked for as one"
        assert (await http.get(f"{RESPONSES}/resp_nobody", params={"stream": "true"})).status_code == 404


async def test_events_are_bounded_and_the_response_is_kept_without_them(model_path: Path) -> None:
    async with paused_mesh(model_path, max_stored_response_bytes=4000) as (mesh, script), mesh.http() as http:
        events = Events()
        asking = asyncio.create_task(events.ask(mesh))
        await mesh.worker.wait_until(lambda: len(script.asked) == 1)
        script.finish()
        await asking
        assert events.seen[-1]["type"] != "response.completed", "its stream ends before"
        assert text_of(await ended(mesh, events.response_id)) == TEXT
        answer = await http.get(f"{RESPONSES}/{events.response_id}", params={"stream": "true"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")


async def test_it_is_its_owners_alone(model_path: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{name}:{hashlib.sha256(name.encode()).hexdigest()}\n" for name in ("alice", "bob")))
    async with paused_mesh(model_path, api_keys_file=keys) as (mesh, _):
        promised = await mesh.client("alice").responses.create(**BODY)
        bob = mesh.client("bob").responses
        for call in (bob.retrieve(promised.id), bob.cancel(promised.id), bob.delete(promised.id)):
            with pytest.raises(openai.NotFoundError):
                await call
        assert (await mesh.client("alice").responses.retrieve(promised.id)).status == "in_progress"


@asynccontextmanager
async def two_frontends(model_path: Path) -> AsyncIterator[tuple[MeshOfFakes, Paused, MeshOfFakes, Paused]]:
    """Each with a worker of its own; they know each other."""
    async with (
        paused_mesh(model_path, "frontend-a") as (maker, script),
        paused_mesh(model_path, "frontend-b") as (other, others),
    ):
        introduce(maker, other)
        yield maker, script, other, others


def introduce(maker: MeshOfFakes, other: MeshOfFakes) -> None:
    maker.directory.join(member(other, "frontend-b"))
    other.directory.join(member(maker, "frontend-a"))


async def test_any_frontend_answers_for_what_another_one_makes(model_path: Path) -> None:
    async with two_frontends(model_path) as (maker, script, other, _):
        promised = await promised_by(maker, script)
        assert (await state(other, promised.id))["status"] == "in_progress"
        assert len(other.service.responses.store) == 0, "a state of now is not kept"
        async with other.http() as http:
            answer = await http.get(f"{RESPONSES}/{promised.id}", params={"stream": "true"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")
        script.finish()
        assert text_of(await ended(other, promised.id)) == TEXT
        cancelled = await promised_by(maker, script)
        assert (await other.client().responses.cancel(cancelled.id)).status == "cancelled"
        assert (await state(maker, cancelled.id))["status"] == "cancelled"
        deleted = await promised_by(maker, script)
        await other.client().responses.delete(deleted.id)
        assert (await state(maker, deleted.id))["error"]["code"] == "response_not_found"
        await maker.until(lambda: len(maker.worker.aborted) == 2)
        events = Events()
        await events.begin(maker, script)
        following = asyncio.create_task(events.go_on(other))
        script.finish()
        await following
        assert [each["sequence_number"] for each in events.seen] == list(range(len(events.seen)))
        assert events.text == TEXT


async def test_another_frontend_makes_it_anew_where_the_first_is_lost(model_path: Path) -> None:
    """Its workers are lost with it, so that nothing of it is left."""
    async with two_frontends(model_path) as (maker, script, other, others):
        whole = await promised_by(maker, script)
        events = Events()
        await events.begin(maker, script)
        gone = await promised_by(maker, script)
        script.finish()
        await ended(maker, gone.id)
        await other.until(lambda: other.service.responses.store.find(gone.id, "") is not None)
        other.directory.leave(member(maker, "frontend-a"))
        await other.worker.wait_until(lambda: len(others.asked) == 2)
        assert (await state(other, whole.id))["status"] == "in_progress"
        for place in (0, 1):
            others.finish(place)
        for response_id in (whole.id, events.response_id):
            made = await ended(other, response_id)
            assert (made["id"], made["status"], text_of(made)) == (response_id, "completed", TEXT)
        assert other.metric("taken_over_responses_total") == 2, "not what had ended"
        async with other.http() as http:
            path = f"{RESPONSES}/{events.response_id}?stream=true&starting_after=4"
            answer = await http.get(path)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream"), "it may say something else"


async def test_a_frontend_that_goes_on_for_nothing_stops_at_the_end_that_comes(model_path: Path) -> None:
    """The first one drains, and comes to the end of what nobody else can go on with."""
    async with two_frontends(model_path) as (maker, script, other, others):
        promised = await promised_by(maker, script, extra_body={"enable_response_messages": True})
        other.directory.leave(member(maker, "frontend-a"))
        await other.worker.wait_until(lambda: len(others.asked) == 1)
        draining = asyncio.create_task(maker.role.drain())
        script.finish()
        await draining
        made = await ended(other, promised.id)
        assert text_of(made) == TEXT
        assert made["output_messages"]
        await other.worker.wait_until(lambda: len(other.worker.aborted) == 1)


async def real_worker(stack: AsyncExitStack, frontends: Sequence[MeshOfFakes]) -> None:
    """An instance of the simulated engine that all of them have."""
    worker = await stack.enter_async_context(worker_process("--engine-arg", "time_scale=0.3"))
    path = str(ROOT / "demo" / "models" / MODEL)
    facts = {"model": MODEL, "model_path": path, "block_tokens": "16", "max_model_len_tokens": "4096"}
    instance = Member("worker", "worker-0", await incarnation_of(worker.address), worker.address, "", facts)
    for each in frontends:
        each.directory.join(instance)
        assert await each.service.pool.wait_connected("worker-0", 5.0) is not None


@pytest.mark.parametrize("how", ["it leaves", "it stops"])
async def test_another_frontend_goes_on_with_a_stream_and_numbers_its_events_alike(model_path: Path, how: str) -> None:
    body = {"model": MODEL, "input": "Tell me.", "max_output_tokens": 150, "temperature": 0, "ignore_eos": True}
    async with (
        AsyncExitStack() as stack,
        mesh_of_fakes(model_path, member_id="frontend-a") as maker,
        mesh_of_fakes(model_path, member_id="frontend-b") as other,
    ):
        await real_worker(stack, (maker, other))
        introduce(maker, other)
        truth = Events()
        await truth.ask(maker, **body)
        events = Events()
        await events.ask(maker, 20, **body)
        if how == "it stops":
            await maker.role.stop()
        other.directory.leave(member(maker, "frontend-a"))
        await other.until(lambda: other.metric("taken_over_responses_total") == 1)
        await events.go_on(other)
        assert [each["sequence_number"] for each in events.seen] == list(range(len(truth.seen)))
        assert events.text == truth.text
        assert events.seen[-1]["type"] == "response.incomplete"
        assert events.seen[-1]["response"] == await state(other, events.response_id)
        deltas = [each["delta"] for each in truth.seen if each["type"] == "response.output_text.delta"]
        assert [each["delta"] for each in events.seen if each["type"] == "response.output_text.delta"] == deltas
