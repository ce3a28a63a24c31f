"""Profiles as `penstock profile` makes them, of instances nobody has."""

from controlplane.planning.instance_profile import InstanceProfile, InstanceSizes, StepCoefficients, StepFit
from controlplane.planning.qoe import QoeFit, QoeModel
from controlplane.prediction.ttft import TtftCurve

NO_QOE = QoeFit(QoeModel(*(0.0,) * 5), 0, 0, 0.0, 0.0)
SIZES = InstanceSizes(32, 1000, 4096, 16, 2048)


def profile_of(
    model: str, token_ms: float, tensor_parallel: int = 1, pipeline_parallel: int = 1, device: str = "H100"
) -> InstanceProfile:
    """Of an instance that decodes a token of one request in `token_ms`."""
    coefficients = StepCoefficients(fixed_ms=0.9 * token_ms, prefill_token_ms=0.1, decode_request_ms=0.1 * token_ms)
    return InstanceProfile(
        engine="vllm",
        model=model,
        device=device,
        sizes=SIZES,
        step=StepFit(coefficients, 10, 10, 0.01, 0.0),
        ttft=TtftCurve(5.0, 0.1, 0.0),
        decode_points=(),
        qoe=NO_QOE,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
    )
