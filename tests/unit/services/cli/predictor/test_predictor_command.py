"""`penstock predictor` from prompts to a report, without an engine."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from mesh.errors import ConfigurationError
from mesh.runtime import SystemClock
from services.cli.predictor.command import command
from services.cli.predictor.prompts import tokenised_prompts
from services.frontend.text.model_text import ModelText
from services.predictor.artefact import load_artefact
from tests.unit.services.predictor.artefacts import make_artefact, make_dataset

MODEL = Path(__file__).resolve().parents[5] / "demo" / "models" / "demo-small"
SMALL = ("--hidden-sizes", "16,8,4", "--epochs", "4", "--learning-rate", "0.003")


def run(*arguments: object) -> str:
    result = CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="training needs PyTorch")


@pytest.mark.slow
@needs_torch
def test_train_and_evaluate(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", requests=200)
    out, plots = tmp_path / "artefact", tmp_path / "plots"
    trained = json.loads(run("train", "--data", tmp_path / "data", "--out", out, *SMALL, "--plots", plots, "--json"))
    artefact = load_artefact(out)
    assert artefact.metadata.inputs == "state+counts"
    assert artefact.metadata.sizes == (16, 8, 4, 1)
    assert trained["artefact"] == artefact.name
    assert set(trained["mae_tokens"]) == {"predictor", "predictor_once", "constant", "prompt_only", "generated_only"}
    assert artefact.metadata.mae_tokens["test"] == pytest.approx(trained["mae_tokens"]["predictor"])
    assert json.loads((out / "report.json").read_text())["mae_tokens"] == trained["mae_tokens"]
    assert {file.name for file in plots.iterdir()} == {"m-loss.png", "m-errors.png"}
    evaluated = json.loads(run("evaluate", "--data", tmp_path / "data", "--artefact", out, "--json"))
    assert evaluated == trained
    assert "against the best baseline" in run("evaluate", "--data", tmp_path / "data", "--artefact", out)


@pytest.mark.slow
@needs_torch
def test_comparison_adds_ablations_and_a_model_of_the_prompt(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", requests=200)
    options = ("--data", tmp_path / "data", "--out", tmp_path / "artefact", *SMALL, "--inputs", "state", "--compare")
    report = json.loads(run("train", *options, "--json"))
    assert {"inputs:state+counts", "inputs:counts", "prompt_reader"} <= set(report["mae_tokens"])
    # Here the states tell the length, and nothing else does.
    assert report["mae_tokens"]["predictor"] < report["mae_tokens"]["inputs:counts"]


def test_an_artefact_of_another_model_is_refused(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", requests=200)
    make_artefact(tmp_path / "artefact", model="other", fingerprint="f" * 16)
    with pytest.raises(ConfigurationError, match="was trained on 'other'"):
        run("evaluate", "--data", tmp_path / "data", "--artefact", tmp_path / "artefact")


def test_widths_are_checked() -> None:
    result = CliRunner().invoke(command, ["train", "--data", "x", "--out", "y", "--hidden-sizes", "wide"])
    assert result.exit_code == 2
    assert "no list of widths" in result.output


def test_demo_tasks_are_drawn_alike_and_as_hard_as_asked() -> None:
    text = ModelText.load(MODEL, SystemClock().unix_s)
    prompts = list(tokenised_prompts(text, None, 8, 40, seed=3))
    assert prompts[:20] == list(tokenised_prompts(text, None, 8, 20, seed=3))
    easy = list(tokenised_prompts(text, None, 2, 40, seed=3))
    assert max(map(len, easy)) < max(map(len, prompts))


def test_prompts_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "Spell: crow"}]
    file.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps({"prompt": "Spell: crow"}) + "\n{}\n")
    text = ModelText.load(MODEL, SystemClock().unix_s)
    chat, plain = tokenised_prompts(text, file, 8, 2, seed=0)
    assert len(chat) > len(plain)
    with pytest.raises(ConfigurationError, match="line 3: expected"):
        list(tokenised_prompts(text, file, 8, 3, seed=0))


def test_serving_is_the_role_itself() -> None:
    output = run("serve", "--help")
    assert "--artefact" in output
    assert "Run a predictor until SIGTERM" in output
    assert all(step in run("--help") for step in ("collect", "train", "evaluate", "serve"))
