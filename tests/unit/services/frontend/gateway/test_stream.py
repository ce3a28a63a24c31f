"""What a gateway answers to each message of an Envoy."""

import asyncio
import json
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from controlplane.model.prefix_hash import block_hashes
from penstock.v1 import ext_proc_pb2 as envoy
from penstock.v1 import scheduler_pb2
from tests.unit.services.frontend.fakes import by_model
from tests.unit.services.frontend.gateway.gateway_of_fakes import Asked, attached, gateway_of_fakes
from tests.unit.services.frontend.mesh_of_fakes import mesh_of_fakes, until

pytestmark = pytest.mark.live

FIRST, SECOND, THIRD = "10.0.0.1:8000", "10.0.0.2:8000", "[fd00::3]:8000"
PROMPT = [7] * 40
BODY: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 5}
USAGE = {"prompt_tokens": 40, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 32}}


def servers(model_path: Path) -> tuple[Any, ...]:
    urls = (f"http://{FIRST}", f"http://{SECOND}", f"http://{THIRD}")
    return tuple(attached(model_path, f"server-{index}", url) for index, url in enumerate(urls))


async def picked(asked: Asked, content: Any = BODY) -> tuple[str, ...]:
    await asked.headers()
    await asked.body(content)
    return await asked.destination()


@pytest.mark.slow
async def test_a_request_is_placed_by_its_prompt_and_its_end_is_told(model_path: Path) -> None:
    async with gateway_of_fakes(*servers(model_path)) as gateway:
        asked = gateway.ask()
        assert await picked(asked) == (FIRST, SECOND, THIRD)
        (placed,) = gateway.scheduler.placed
        assert (placed.prompt_tokens, placed.max_tokens, placed.model) == (40, 5, "demo")
        assert list(placed.block_hashes) == block_hashes(PROMPT, 16)
        assert gateway.scheduler.linked_at_place == [("server-0", "server-1", "server-2")]
        passed = (await asked.read()).request_body.response.body_mutation.streamed_response
        assert (json.loads(passed.body), passed.end_of_stream) == (BODY, True)
        await asked.answer(b'{"choices": [], ', f'"usage": {json.dumps(USAGE)}}}'.encode())
        headers = (await asked.read()).response_headers.response.header_mutation.set_headers
        told = {each.header.key: each.header.raw_value.decode() for each in headers}
        assert (told["x-penstock-instance"], told["x-penstock-policy"]) == ("server-0", "fake")
        assert told["x-penstock-request-id"] == placed.request_id
        first, last = await asked.read(), await asked.read()
        assert first.response_body.response.body_mutation.streamed_response.body == b'{"choices": [], '
        assert last.response_body.response.body_mutation.streamed_response.end_of_stream
        await until(lambda: bool(gateway.scheduler.ended))
        (ended,) = gateway.scheduler.ended
        assert (ended.request_id, ended.ok, ended.reason) == (placed.request_id, True, "finished")
        await asked.call.done_writing()
        assert await asked.call.read() is grpc.aio.EOF
        assert gateway.metric("requests_total", model="demo", reason="finished") == 1
        assert gateway.metric("prompt_tokens_total", model="demo") == 40
        assert gateway.metric("cached_tokens_total", model="demo") == 32
        assert gateway.metric("generated_tokens_total", model="demo") == 5
        await until(lambda: gateway.metric("streams") == 0)


@pytest.mark.slow
async def test_a_conversation_has_the_tokens_that_the_frontend_gives_it(model_path: Path) -> None:
    messages = [{"role": "user", "content": "Tell me a long story about a long prompt."}]
    fields = {"model": "demo", "messages": messages, "max_tokens": 7, "a_field_of_tomorrow": 1}
    async with gateway_of_fakes(*servers(model_path)) as gateway:
        asked = gateway.ask()
        await asked.headers("/v1/chat/completions?x=1")
        whole = json.dumps(fields).encode()
        await asked.body(whole[:10], whole[10:30], whole[30:], b"")
        assert (await asked.destination())[0] == FIRST
        (placed,) = gateway.scheduler.placed
        assert gateway.metric("unread_prompts_total", model="demo") == 0
    async with mesh_of_fakes(model_path, lambda _: []) as mesh:
        expected = mesh.text.template
        assert expected is not None
        text = expected.render(messages, add_generation_prompt=True, variables={})
        token_ids = mesh.ids(text)
    assert placed.prompt_tokens == len(token_ids)
    assert list(placed.block_hashes) == block_hashes(token_ids, 16)


async def test_an_id_of_the_clients_is_part_of_ours_where_it_can_be(model_path: Path) -> None:
    async with gateway_of_fakes(*servers(model_path)) as gateway:
        for given, is_kept in (("abc-1", True), ("what is this?", False)):
            asked = gateway.ask()
            await asked.headers(x_request_id=given)
            await asked.body(BODY)
            await asked.destination()
            assert (given in gateway.scheduler.placed[-1].request_id) is is_kept
        assert len(gateway.scheduler.placed) == 2


async def test_a_gateway_that_knows_no_endpoint_is_not_healthy_but_lives(model_path: Path) -> None:
    async def health(name: str) -> str:
        stub = health_pb2_grpc.HealthStub(gateway.channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))

    async def until_health(names: tuple[str, ...], expected: str) -> None:
        async with asyncio.timeout(5):
            while {await health(name) for name in names} != {expected}:  # noqa: ASYNC110 - another end's
                await asyncio.sleep(0.01)

    ready = ("readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
    server, *_ = servers(model_path)
    async with gateway_of_fakes() as gateway:
        await gateway.server.set_serving(True)  # as a role's process does once it is started
        await until_health(ready, "NOT_SERVING")
        assert {await health("liveness"), await health("")} == {"SERVING"}, "the process itself is well"
        gateway.directory.join(server)
        await until_health(ready, "SERVING")
        gateway.directory.leave(server)
        await until_health(ready, "NOT_SERVING")
        gateway.directory.join(server)
        await until_health(ready, "SERVING")
        await gateway.role.drain()
        gateway.service.picker.endpoints.wake()
        assert await health("readiness") == "NOT_SERVING"
        assert await health("liveness") == "SERVING"


async def test_what_the_server_may_understand_is_placed_by_load_alone(model_path: Path) -> None:
    async with gateway_of_fakes(*servers(model_path)) as gateway:
        for path, fields in (
            ("/v1/embeddings", {"model": "demo", "input": "x" * 400}),
            ("/v1/chat/completions", {"model": "demo", "messages": "none" * 100}),
        ):
            asked = gateway.ask()
            await asked.headers(path)
            await asked.body(fields)
            assert (await asked.destination())[0] == FIRST
            placed = gateway.scheduler.placed[-1]
            assert not placed.block_hashes
            assert placed.prompt_tokens == len(json.dumps(fields)) // 4
            asked.call.cancel()
        assert gateway.metric("unread_prompts_total", model="demo") == 1


async def test_chats_that_only_vllm_writes_are_placed_by_load_alone(model_path: Path) -> None:
    """The server beside the endpoint writes them; a gateway has no process for it."""
    known = [
        replace(each, attributes={**each.attributes, "tokenizer_mode": "deepseek_v32"}) for each in servers(model_path)
    ]
    async with gateway_of_fakes(*known) as gateway:
        asked = gateway.ask()
        await asked.headers("/v1/chat/completions")
        await asked.body({"model": "demo", "messages": [{"role": "user", "content": "x" * 400}]})
        assert (await asked.destination())[0] == FIRST
        assert not gateway.scheduler.placed[-1].block_hashes
        assert gateway.metric("unread_prompts_total", model="demo") == 1


async def test_what_names_no_model_is_left_to_envoy_which_no_client_may_direct(model_path: Path) -> None:
    async with gateway_of_fakes(*servers(model_path)) as gateway:
        for content in (None, b"--form data", b'{"no": "model"}'):
            asked = gateway.ask()
            await asked.headers("/v1/audio", ends=content is None, x_gateway_destination_endpoint="1.2.3.4:5")
            if content is not None:
                await asked.body(content)
            message = await asked.read()
            mutation = message.request_headers.response.header_mutation
            assert list(mutation.remove_headers) == ["x-gateway-destination-endpoint"]
            assert not mutation.set_headers
            assert not message.HasField("dynamic_metadata")
            if content is not None:
                passed = (await asked.read()).request_body.response.body_mutation.streamed_response
                assert (passed.body, passed.end_of_stream) == (content, True)
            asked.call.cancel()
        assert not gateway.scheduler.placed


async def test_only_endpoints_that_the_gateway_allows_are_picked(model_path: Path) -> None:
    def choose(request: scheduler_pb2.PlaceRequest) -> scheduler_pb2.PlaceResponse:
        free = [name for name in ("server-0", "server-1", "server-2") if name not in request.excluded_instance_ids]
        return by_model({"demo": free[0]})(request)

    async with gateway_of_fakes(*servers(model_path), choose=choose, instance_wait_s=0) as gateway:
        asked = gateway.ask()
        await asked.headers(subset=(SECOND, "10.9.9.9:1"))
        await asked.body(BODY)
        assert await asked.destination() == (SECOND,)
        for subset in ((), ("10.9.9.9:1",)):
            asked = gateway.ask()
            await asked.headers(subset=subset)
            await asked.body(BODY)
            status, error, _ = await asked.refusal()
            assert (status, error["code"]) == (503, "no_instance")


async def test_refusals_have_the_form_of_openai(model_path: Path) -> None:
    cases: list[tuple[bytes, int, str | None]] = [
        (b"{", 400, None),
        (b"[1]", 400, None),
        (b'{"model": 3}', 400, "invalid_value"),
        (b'{"model": "other", "prompt": "x"}', 404, "model_not_found"),
        (b'{"model": "' + b"x" * 600 + b'"}', 413, "request_too_large"),
    ]
    async with gateway_of_fakes(*servers(model_path), max_body_bytes=512) as gateway:
        for content, expected, code in cases:
            asked = gateway.ask()
            await asked.headers()
            await asked.body(content)
            status, error, headers = await asked.refusal()
            assert (status, error["code"]) == (expected, code), content
            assert headers["content-type"] == "application/json"
        assert gateway.metric("refused_total", status="400") == 3
        assert not gateway.scheduler.placed


async def test_a_body_that_does_not_come_is_refused(model_path: Path) -> None:
    async with gateway_of_fakes(*servers(model_path), body_deadline_s=0.05) as gateway:
        asked = gateway.ask()
        await asked.headers()
        assert (await asked.refusal())[0] == 408
        assert (await gateway.ask().refusal())[0] == 408, "nor do headers"


async def test_what_there_is_no_room_for_is_refused(model_path: Path) -> None:
    async with gateway_of_fakes(*servers(model_path), max_streams=2, max_held_bytes=100) as gateway:
        holding = gateway.ask()
        await holding.headers()
        await holding.say(request_body=envoy.HttpBody(body=b"x" * 80))
        await until(lambda: gateway.metric("held_bytes") == 80)
        second = gateway.ask()
        await second.headers()
        await until(lambda: gateway.metric("streams") == 2)
        status, error, headers = await gateway.ask().refusal()
        assert (status, error["code"]) == (429, "too_many_streams")
        assert int(headers["retry-after"]) >= 1
        await second.say(request_body=envoy.HttpBody(body=b"x" * 30))
        assert (await second.refusal())[0] == 503
        holding.call.cancel()
        await until(lambda: gateway.metric("held_bytes") == 0)
        await until(lambda: gateway.metric("streams") == 0)


async def test_a_client_that_goes_is_told_to_the_scheduler(model_path: Path) -> None:
    async with gateway_of_fakes(*servers(model_path)) as gateway:
        asked = gateway.ask()
        await picked(asked)
        assert gateway.service.picker.endpoints.requests == {"server-0": 1}
        asked.call.cancel()
        await until(lambda: bool(gateway.scheduler.ended))
        (ended,) = gateway.scheduler.ended
        assert (ended.ok, ended.reason) == (False, "aborted")
        assert not gateway.service.picker.endpoints.requests


class ClosedAtTheEnd:
    """A stream that Envoy closes as soon as it has sent the last piece of an answer."""

    def __init__(self) -> None:
        self._sent: deque[Any] = deque()

    async def write(self, message: envoy.ProcessingRequest) -> None:
        """What Envoy says; `Asked` calls it."""
        self._sent.append(message)

    async def read(self) -> Any:
        """What the gateway hears."""
        return self._sent.popleft() if self._sent else grpc.aio.EOF

    async def hear(self, message: envoy.ProcessingResponse) -> None:
        """What the gateway says."""
        if message.WhichOneof("response") == "response_body":
            raise grpc.aio.UsageError("RPC already finished.")


async def test_an_end_is_told_though_its_last_piece_cannot_be_given_back(model_path: Path) -> None:
    async with gateway_of_fakes(*servers(model_path)) as gateway:
        stream = ClosedAtTheEnd()
        asked = Asked(stream)
        await asked.headers()
        await asked.body(BODY)
        await asked.answer(b"{}")
        heard = SimpleNamespace(read=stream.read, write=stream.hear)
        with pytest.raises(grpc.aio.UsageError):
            await gateway.service.Process(None, heard)
        await until(lambda: bool(gateway.scheduler.ended))
        assert [(each.ok, each.reason) for each in gateway.scheduler.ended] == [(True, "finished")]
        assert not gateway.service.picker.endpoints.requests
        assert gateway.metric("streams") == 0


async def test_a_client_that_goes_while_its_request_waits_leaves_nothing_behind(model_path: Path) -> None:
    none = scheduler_pb2.PlaceResponse(outcome=scheduler_pb2.PLACE_OUTCOME_NO_INSTANCE, message="all are full")
    async with gateway_of_fakes(*servers(model_path), choose=lambda _: none) as gateway:
        asked = gateway.ask()
        await asked.headers()
        await asked.body(BODY)
        await until(lambda: gateway.metric("waiting_requests") == 1)
        asked.call.cancel()
        await until(lambda: gateway.metric("waiting_requests") == 0)
        assert gateway.metric("streams") == 0
        assert gateway.metric("held_bytes") == 0


async def test_a_request_waits_for_an_endpoint_and_goes_there_when_it_comes(model_path: Path) -> None:
    first, second, _ = servers(model_path)
    async with gateway_of_fakes(first, choose=by_model({"demo": "server-1"})) as gateway:
        gateway.directory.leave(first)
        asked = gateway.ask()
        await asked.headers()
        await asked.body(BODY)
        await until(lambda: gateway.metric("waiting_requests") == 1)
        gateway.directory.join(second)
        assert await asked.destination() == (SECOND,)


async def test_without_a_scheduler_endpoints_come_in_turn(model_path: Path) -> None:
    async with gateway_of_fakes(*servers(model_path), choose=lambda _: None, placement_deadline_s=0.05) as gateway:
        firsts = set()
        for _ in range(3):
            asked = gateway.ask()
            firsts.add((await picked(asked))[0])
        assert firsts == {FIRST, SECOND, THIRD}
        assert gateway.metric("fallback_in_force") == 1
        assert gateway.metric("fallback_placements_total") == 3


@pytest.mark.slow
async def test_an_endpoint_that_has_a_name_is_one_when_its_address_is_known(model_path: Path) -> None:
    known: dict[str, str] = {}

    def resolve(host: str) -> str:
        if host not in known:
            raise OSError("not yet")
        return known[host]

    named = attached(model_path, "server-0", "http://gpu-1/v1")
    async with gateway_of_fakes(named, resolve=resolve) as gateway:
        assert gateway.scheduler.linked[-1:] in ([], [()])
        known["gpu-1"] = "fd00::7"
        asked = gateway.ask()
        assert await picked(asked) == ("[fd00::7]:80",)


async def test_a_mode_in_which_no_body_comes_is_refused_aloud(
    model_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway_of_fakes(*servers(model_path)) as gateway:
        asked = gateway.ask()
        await asked.headers(modes=envoy.ProtocolConfiguration(request_body_mode=envoy.BUFFERED))
        status, error, _ = await asked.refusal()
        assert (status, error["code"]) == (500, "gateway_misconfigured")
        assert "FULL_DUPLEX_STREAMED" in error["message"]
        assert any("mode" in record.message for record in caplog.records)


async def test_an_answer_in_another_mode_is_only_nodded_to(model_path: Path) -> None:
    modes = envoy.ProtocolConfiguration(request_body_mode=envoy.FULL_DUPLEX_STREAMED, response_body_mode=envoy.STREAMED)
    async with gateway_of_fakes(*servers(model_path)) as gateway:
        asked = gateway.ask()
        await asked.headers(modes=modes)
        await asked.body(BODY)
        await asked.destination()
        await asked.read()
        await asked.answer(b"x", b"", served=SECOND)
        await asked.read()
        assert not (await asked.read()).response_body.HasField("response")
        assert gateway.metric("rerouted_total", model="demo") == 1


async def test_nonsense_ends_a_stream_with_its_name(model_path: Path) -> None:
    async with gateway_of_fakes(*servers(model_path)) as gateway:
        asked = gateway.ask()
        await asked.say(response_body=envoy.HttpBody(body=b"x"))
        assert await asked.call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_drain_waits_for_what_passes(model_path: Path) -> None:
    async with gateway_of_fakes(*servers(model_path)) as gateway:
        asked = gateway.ask()
        await picked(asked)
        drain = asyncio.create_task(gateway.role.drain())
        await asyncio.sleep(0)
        assert not drain.done()
        await asked.answer(b"x", b"")
        await asked.call.done_writing()
        async with asyncio.timeout(5):
            await drain
