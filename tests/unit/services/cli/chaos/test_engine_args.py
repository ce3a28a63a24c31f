"""Engine arguments of the mesh that `penstock chaos` brings up."""

import pytest

from services.cli.chaos.command import _full_name


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ("tensor_parallel=2", "tensor_parallel_size=2"),
        ("pipeline_parallel=2", "pipeline_parallel_size=2"),
        ("tensor_parallel_size=4", "tensor_parallel_size=4"),
        ("speculative_config.method=ngram", "speculative_config.method=ngram"),
    ],
)
def test_shapes_have_a_short_name(given: str, passed: str) -> None:
    assert _full_name(given) == passed
