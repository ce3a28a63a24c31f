"""The conformance suites of Penstock, for what this package adds."""

from pathlib import Path
from types import MappingProxyType

from penstock.testing.engine import EngineConformance
from penstock.testing.judge import JudgeConformance
from penstock.testing.policy import PolicyConformance

DEMO_MODEL = Path(__file__).parents[4] / "demo" / "models" / "demo-small"


class TestFewestTokens(PolicyConformance):
    policy = "fewest_tokens"
    parameters = MappingProxyType({"prefill_weight": 1.5})


class TestPaced(EngineConformance):
    engine = "paced"
    options = ("step_ms=0.1", "max_model_len_tokens=512")
    model_path = str(DEMO_MODEL)
    vocabulary = range(6, 640)
    eos_token_id = 2


class TestLength(JudgeConformance):
    judge = "length:3"
