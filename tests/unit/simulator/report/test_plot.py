from pathlib import Path

import pytest

from simulator.report.outcome import RequestOutcome
from simulator.report.plot import draw_cdfs
from simulator.report.report import Slo

pytest.importorskip("matplotlib", reason="plots need matplotlib")


def run_of(scale: float) -> list[RequestOutcome]:
    return [
        RequestOutcome(float(i), i + scale * (i + 2), i + scale * i, i + scale * (i + 1), output_tokens=i + 1)
        for i in range(50)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "runs",
    [{"lmetric": run_of(0.01), "round_robin": run_of(0.05)}, {"one": run_of(0.01)[:1]}, {"none": []}],
    ids=["two", "single", "empty"],
)
def test_a_png_with_content_is_written(tmp_path: Path, runs: dict[str, list[RequestOutcome]]) -> None:
    from PIL import Image

    path = tmp_path / "cdf.png"
    draw_cdfs(path, runs, Slo(ttft_ms=500, tpot_ms=50), title="test")
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.width >= 1000
        assert len(image.convert("RGB").getcolors(maxcolors=1 << 20) or []) > 20
