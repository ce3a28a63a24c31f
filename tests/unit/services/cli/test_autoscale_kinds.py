"""Kinds of replica on the command line, and what is shown of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.replica_kind import KindReplicas, ReplicaKind
from mesh.errors import ConfigurationError
from services.cli.autoscale.shown import autoscale_lines


@given(
    st.builds(
        ReplicaKind,
        st.floats(0.01, 1e6),
        st.floats(1e-3, 1e6),
        st.text("ABC0-9 .", max_size=9),
        st.integers(1, 16),
        st.integers(1, 4),
        st.integers(1, 1024),
    )
)
def test_a_kind_is_read_as_it_is_written(kind: ReplicaKind) -> None:
    assert ReplicaKind.read(kind.option) == kind


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "H100",
        "gpu=H100",
        "tp=2,price-per-hour=1",
        "price-per-hour=1,capacity=0",
        "price-per-hour=1,capacity=1,tp=x",
        "price-per-hour=1,capacity=1,tp=0",
        "price-per-hour=1,capacity=1,capacity=2",
        "price-per-hour=nan,capacity=1",
        "price-per-hour=1,capacity=1,cost=3",
        "price-per-hour=1,capacity=1,maximum=2000",
    ],
)
def test_what_is_no_kind_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigurationError, match="kind"):
        ReplicaKind.read(wrong)


def test_the_mix_and_its_cost_are_shown() -> None:
    kinds = [{"replicas": 2, "gpu": "H100", "tp": 2}, {"replicas": 1, "gpu": "A10"}]
    status = {"model": "m", "wanted": 3, "serving": 3, "kinds": kinds, "cost_per_hour": 14.8, "why": "load"}
    lines = autoscale_lines([{"model": "m", "policy": {"model": "m", "maximum": 9}, "status": status}])
    assert lines[1] == "  replicas: 2 x H100 TP=2 + 1 x A10 TP=1, 14.8 an hour"
    assert str(KindReplicas(1, pp=2)) == "1 x TP=1 PP=2"
