"""What is accepted as a cascade."""

from math import inf, nan

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.cascade_record import CascadeRecord
from mesh.errors import ConfigurationError

RECORD = CascadeRecord("both", ("small", "large"), (80.0,))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"name": ""}, "needs a name"),
        ({"name": "a/b"}, "without a slash"),
        ({"tiers": ()}, "different models"),
        ({"tiers": ("small", "small")}, "different models"),
        ({"tiers": ("small", "both")}, "tier of its own"),
        ({"thresholds": ()}, "1 thresholds, got 0"),
        ({"thresholds": (-1.0,)}, "scores from 0 on"),
        ({"thresholds": (inf,)}, "above 100 accept nothing"),
        ({"thresholds": (nan,)}, "scores from 0 on"),
        ({"expected_s": (1.0,)}, "a time for each tier"),
        ({"expected_s": (1.0, inf)}, "times from 0 s on"),
        ({"expected_s": (-1.0, 1.0)}, "times from 0 s on"),
        ({"judges": ()}, "at least one judge"),
        ({"speculate": 1.1}, "a probability from 0"),
        ({"speculate": nan}, "a probability from 0"),
        ({"speculate_room": 0}, "speculate_room 1 to"),
    ],
)
def test_what_cannot_be_served_is_refused(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        msgspec.structs.replace(RECORD, **wrong).checked()


@given(threshold=st.floats(), expected_s=st.lists(st.floats(), max_size=3))
def test_what_is_accepted_can_be_read_again(threshold: float, expected_s: list[float]) -> None:
    record = msgspec.structs.replace(RECORD, thresholds=(threshold,), expected_s=tuple(expected_s))
    try:
        record.checked()
    except ConfigurationError:
        return
    assert msgspec.json.decode(msgspec.json.encode(record), type=CascadeRecord) == record
