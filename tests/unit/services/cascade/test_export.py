"""The last samples of a cascade, exported to be labelled and planned with."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from click.testing import CliRunner

from controlplane.planning.cascade.labels import with_labels
from controlplane.planning.cascade.workload import WorkloadHeader, WorkloadRequest, read_window
from mesh.rpc.client import open_channel
from mesh.runtime import GrpcTransport
from penstock.v1 import cascade_pb2, cascade_pb2_grpc
from services.cascade.role import CascadeRole
from services.cascade.sampling import kept
from services.cascade.sampling.kept import KeptSamples, SampleText
from services.cascade.settings import CascadeSettings
from services.cli import cascade as cli
from tests.unit.controlplane.local_mesh import local_mesh

REQUEST = WorkloadRequest(7, (3, 4), (50.0, 90.0), request_id="r1")


def test_only_whole_samples_are_kept_and_texts_only_where_they_are_wanted() -> None:
    for keeps_texts in (False, True):
        samples = KeptSamples(keeps_texts)
        samples.add(REQUEST, "2 + 2?", ("5", "4"))
        samples.add(msgspec.structs.replace(REQUEST, scores=(50.0, None), output_tokens=(3, None)), "?", ("5", None))
        (sample,) = samples.page(0)
        assert msgspec.json.decode(sample.line, type=WorkloadRequest) == REQUEST
        text = SampleText("r1", "2 + 2?", ("5", "4"))
        assert sample.text == (msgspec.json.encode(text) if keeps_texts else b"")


def test_pages_follow_each_other_and_none_is_much_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "PAGE_BYTES", 250)
    samples = KeptSamples(keeps_texts=True)
    for number in range(kept.MAX_KEPT + 5):
        samples.add(REQUEST, "long " * 100 if number == 7 else "?", ("5", "4"))
    seen: list[int] = []
    while page := samples.page(seen[-1] if seen else 0):
        assert len(page) == 1 or sum(len(sample.line) + len(sample.text) for sample in page) <= 250
        seen += [sample.number for sample in page]
    assert seen == list(range(6, kept.MAX_KEPT + 6)), "the last ones, each once"


@pytest.mark.live
async def test_a_router_hands_out_texts_only_if_it_was_told_to() -> None:
    async with local_mesh() as mesh:
        record = cascade_pb2.CascadeDescription(name="both", tiers=["small", "large"], thresholds=[70.0])
        for keeps_texts in (False, True):
            started = await mesh.start(CascadeRole(CascadeSettings(sample_texts=keeps_texts)), f"cascade-{keeps_texts}")
            async with open_channel(GrpcTransport(), started.address) as channel:
                stub: Any = cascade_pb2_grpc.CascadeStub(channel)
                await stub.SetCascade(cascade_pb2.SetCascadeRequest(cascade=record))
                async with asyncio.timeout(20.0):
                    while not (await stub.ListCascades(cascade_pb2.ListCascadesRequest())).cascades:  # noqa: ASYNC110
                        await asyncio.sleep(0)
                page = await stub.ExportSamples(cascade_pb2.ExportSamplesRequest(cascade="both"))
                assert (list(page.tiers), page.judge, len(page.samples)) == (["small", "large"], "confidence", 0)
                asked = cascade_pb2.ExportSamplesRequest(cascade="both", texts=True)
                if keeps_texts:
                    await stub.ExportSamples(asked)
                else:
                    with pytest.raises(grpc.aio.AioRpcError, match="--sample-texts"):
                        await stub.ExportSamples(asked)


def test_what_is_exported_can_be_labelled_and_planned_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = WorkloadHeader(2.0, ("small", "large"), "confidence")
    exported = cli._Exported(header, [msgspec.json.encode(REQUEST)], [b'{"request_id": "r1"}'])

    async def fetched(_store: str | None, _mesh: str, name: str, with_texts: bool) -> Any:
        return exported if with_texts else exported._replace(lines=[])

    monkeypatch.setattr(cli, "_exported", fetched)
    out, texts = tmp_path / "sample.jsonl", tmp_path / "texts.jsonl"
    result = CliRunner().invoke(cli.command, ["export", "both", "--out", str(out), "--texts", str(texts)])
    assert result.exit_code == 0, result.output
    assert "1 samples of both, scored by confidence, without labels" in result.output
    window = read_window(out.read_bytes().splitlines())
    assert window.requests == (REQUEST,)
    labelled = with_labels(window, [b'{"request_id": "r1", "quality": [0, 100]}'], "people")
    assert labelled.requests[0].quality == (0.0, 100.0)
    assert texts.read_bytes() == b'{"request_id": "r1"}\n'
    nothing = CliRunner().invoke(cli.command, ["export", "both", "--out", str(out)])
    assert nothing.exit_code == 1
    assert "samples are taken while requests come" in nothing.output


async def test_the_samples_of_all_routers_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    class Directory:
        def members(self, _role: str) -> tuple[str, ...]:
            return ("cascade-0", "cascade-1")

    class Opened:
        async def __aenter__(self) -> Any:
            return Directory()

        async def __aexit__(self, *_: object) -> None:
            pass

    async def page(router: Any, _name: str, _texts: bool, after: int) -> cascade_pb2.ExportSamplesResponse:
        samples = [cascade_pb2.ExportedSample(number=after + 1, line=f"{router}/{after + 1}".encode())]
        return cascade_pb2.ExportSamplesResponse(
            samples=samples if after < 2 else [], tiers=["small", "large"], judge="exact", rate_per_s=1.5
        )

    monkeypatch.setattr(cli, "mesh_store", lambda *_: Opened())
    monkeypatch.setattr(cli, "mesh_directory", lambda *_: Opened())
    monkeypatch.setattr(cli, "_page", page)
    exported = await cli._exported(None, "default", "both", False)
    assert exported.header == WorkloadHeader(3.0, ("small", "large"), "exact")
    assert exported.lines == [b"cascade-0/1", b"cascade-0/2", b"cascade-1/1", b"cascade-1/2"]
