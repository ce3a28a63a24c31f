import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.traces.block_runs import BlockRuns


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 30)), max_size=6), st.integers(0, 1 << 40))
def test_runs_are_the_sequence_that_they_name(runs: list[tuple[int, int]], offset: int) -> None:
    expected = [name for first, count in runs for name in range(first, first + count)]
    names = BlockRuns(runs)
    assert list(names) == expected
    assert len(names) == len(expected)
    assert [names[place] for place in range(-len(names), len(names))] == expected + expected
    assert names[1:7] == tuple(expected[1:7])
    assert np.asarray(names, dtype=np.int64).tolist() == expected
    assert list(names.shifted(offset)) == [name + offset for name in expected]
    assert names == BlockRuns(list(runs))
    assert hash(names) == hash(BlockRuns(list(runs)))
    with pytest.raises(IndexError):
        names[len(names)]
