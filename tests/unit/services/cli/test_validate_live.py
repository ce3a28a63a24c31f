"""`penstock validate --live`: rounds, what the mesh adds, and what makes a comparison worthless."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from controlplane.planning.instance_profile import InstanceProfile, InstanceSizes, StepCoefficients, StepFit
from controlplane.planning.qoe import QoeFit, QoeModel
from controlplane.prediction.ttft import TtftCurve
from mesh.errors import ConfigurationError, PenstockError
from services.cli.validate import command
from services.cli.validation.live import (
    SINGLE_ANSWER_TOKENS,
    SINGLE_PROMPT_TOKENS,
    LiveModel,
    check_failures,
    rounds_of,
)
from simulator.traces.request import TraceRequest
from simulator.traces.source import TraceRecipe
from simulator.validation.latencies import MeanLatencies

SINGLE = [[TraceRequest(0.0, SINGLE_PROMPT_TOKENS, SINGLE_ANSWER_TOKENS)]]
PROFILE = InstanceProfile(
    engine="simulated",
    model="m",
    device="simulated",
    sizes=InstanceSizes(16, 1024, 4096, 32, 2048),
    step=StepFit(StepCoefficients(fixed_ms=4.0, prefill_token_ms=0.1, context_token_ms=0.001), 100, 30, 0.0, 0.0),
    ttft=TtftCurve(4.0, 0.1, 0.0),
    decode_points=(),
    qoe=QoeFit(QoeModel(1.0, 0.0, 0.0, 0.0, 0.0), 30, 10, 0.1, 0.5),
)


def test_a_clip_is_divided_into_rounds_with_prompts_of_their_own() -> None:
    parts = rounds_of(TraceRecipe("synthetic", seed=5, clip_start_s=10.0, clip_end_s=40.0), 3)
    assert [(part.clip_start_s, part.clip_end_s) for part in parts] == [(10.0, 20.0), (20.0, 30.0), (30.0, 40.0)]
    assert len({part.seed for part in parts}) == 3
    with pytest.raises(ConfigurationError, match="clip with an end"):
        rounds_of(TraceRecipe("synthetic"), 2)


def test_what_single_requests_take_beyond_the_profile_is_the_meshs() -> None:
    bare = LiveModel.of(PROFILE, MeanLatencies(0.0, 0.0, 0.0))
    alone = bare.simulate(SINGLE, 1)
    assert bare.request_ms == 0.0, "a mesh never makes an instance faster"
    slower = LiveModel.of(PROFILE, MeanLatencies(alone.ttft_ms + 7.0, alone.tpot_ms + 0.5, 0.0))
    found = slower.simulate(SINGLE, 1)
    assert found.tpot_ms == pytest.approx(alone.tpot_ms + 0.5)
    assert found.ttft_ms == pytest.approx(alone.ttft_ms + 7.0)
    assert slower.request_ms == pytest.approx(6.5), "half a millisecond of it is the prefill step's"
    assert found.e2e_ms == pytest.approx(alone.e2e_ms + 7.0 + 0.5 * (SINGLE_ANSWER_TOKENS - 1))


def test_parts_find_idle_instances() -> None:
    model = LiveModel.of(PROFILE, MeanLatencies(0.0, 0.0, 0.0))
    burst = [TraceRequest(0.0, 512, 64)] * 8
    together, apart = model.simulate([burst], 1), model.simulate([[request] for request in burst], 1)
    assert together.ttft_ms > apart.ttft_ms


def test_a_few_failures_are_told_and_many_end_the_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    check_failures([], 100)
    check_failures(["HTTP 503"], 100)
    assert "1 of 100 requests" in capsys.readouterr().err
    with pytest.raises(PenstockError, match="3 of 100"):
        check_failures(["HTTP 503"] * 3, 100)


def test_nothing_to_compare_with_is_a_usage_error() -> None:
    assert CliRunner().invoke(command, []).exit_code == 2


def test_a_trace_of_no_use_is_refused_before_a_mesh_is_started(tmp_path: Path) -> None:
    header = tmp_path / "header.csv"
    header.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    for trace in (tmp_path / "none.csv", header):
        result = CliRunner().invoke(command, ["--engine", "simulated", "--trace", str(trace)])
        assert result.exit_code == 2
        assert "--trace" in result.output
    result = CliRunner().invoke(command, ["--engine", "simulated", "--clip", "0:0.000001"])
    assert "within --clip" in result.output
