"""Prompts share blocks only under one salt and one LoRA adapter."""

from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.prefix_hash import ROOT_HASH, block_hashes, root_hash

TEXTS = st.one_of(st.sampled_from(("", "a", "b", "ab")), st.text())


@given(TEXTS, TEXTS, TEXTS, TEXTS)
def test_chains_begin_alike_under_the_same_salt_and_adapter_only(
    salt: str, digest: str, other_salt: str, other_digest: str
) -> None:
    first, second = root_hash(salt, digest), root_hash(other_salt, other_digest)
    assert (first == second) == ((salt, digest) == (other_salt, other_digest))
    tokens = tuple(range(32))
    assert (block_hashes(tokens, 16, first) == block_hashes(tokens, 16, second)) == (first == second)


def test_without_either_it_is_the_root() -> None:
    assert root_hash("") == ROOT_HASH
