"""What a frontend records of a request, and what it passes on."""

from pathlib import Path

import pytest

from mesh.tracing import NO_TRACES, Tracer
from penstock.v1 import request_pb2
from tests.unit.mesh.test_tracing import PARENT, UNSAMPLED, Chance, Recorded, SetClock
from tests.unit.services.frontend.fakes import failure, tokens
from tests.unit.services.frontend.mesh_of_fakes import mesh_of_fakes

pytestmark = pytest.mark.live

BODY = {"model": "demo", "prompt": "x"}


async def test_a_request_s_hops_are_parts_of_its_client_s_trace(model_path: Path) -> None:
    recorded = Recorded()
    async with mesh_of_fakes(model_path, lambda _: tokens([70], [1])) as mesh, mesh.http() as http:
        mesh.service.tracer = Tracer(recorded, SetClock(), Chance())
        answer = await http.post("/v1/completions", json=BODY, headers={"traceparent": PARENT})
        (received,) = mesh.worker.received
    spans = {span.name: span for span in recorded.spans}
    assert set(spans) == {"/v1/completions", "queue", "place"}
    whole = spans["/v1/completions"]
    assert str(whole.parent) == PARENT
    assert spans["queue"].parent == spans["place"].parent == whole.context
    assert received.traceparent == str(whole.context)
    assert whole.attributes == {"request_id": answer.json()["id"], "model": "demo", "status": 200}
    assert spans["place"].attributes["instance"] == "worker-0"


async def test_a_failure_is_told(model_path: Path) -> None:
    recorded = Recorded()
    error = failure(request_pb2.ERROR_CODE_REFUSED, "too odd")
    async with mesh_of_fakes(model_path, lambda _: [error]) as mesh, mesh.http() as http:
        mesh.service.tracer = Tracer(recorded, SetClock(), Chance())
        await http.post("/v1/completions", json=BODY)
    (whole,) = [span for span in recorded.spans if span.name == "/v1/completions"]
    assert "too odd" in whole.error
    assert whole.attributes["status"] == 400
    assert whole.parent is None


@pytest.mark.parametrize(
    ("sent", "passed"), [(PARENT, PARENT), (UNSAMPLED, UNSAMPLED), ("x", ""), (PARENT + "\u00e9", "")]
)
async def test_without_an_endpoint_a_client_s_traceparent_goes_on(model_path: Path, sent: str, passed: str) -> None:
    async with mesh_of_fakes(model_path, lambda _: tokens([70], [1])) as mesh, mesh.http() as http:
        assert mesh.service.tracer is NO_TRACES
        await http.post("/v1/completions", json=BODY, headers={"traceparent": sent.encode("latin-1")})
        assert mesh.worker.received[0].traceparent == passed
