"""How many tokens of prompts came from which tier: vLLM and its connector say so in either order."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.model.instance import LoadReport
from engine_worker.engines.vllm.connector.messages import HostLoaded
from engine_worker.engines.vllm.host_tier import VllmHostTier
from engine_worker.engines.vllm.settings import VllmSettings
from engine_worker.kv.layout import KvLayout
from tests.examples import examples

BLOCK_TOKENS = 16
_blocks = st.integers(0, 5)


@dataclass(frozen=True)
class Prompt:
    engine_blocks: int
    host_blocks: int
    token_first: bool
    """Its first token comes before the connector has said what it has loaded."""
    reloaded_blocks: int
    """Loaded once more, after vLLM has preempted it."""


def a_tier() -> VllmHostTier:
    tier = VllmHostTier(VllmSettings(model_path="m", host_kv_bytes=1 << 20))
    tier.open(KvLayout("m", "float32", BLOCK_TOKENS, (64,)))
    return tier


@given(st.lists(st.builds(Prompt, _blocks, _blocks, st.booleans(), _blocks), max_size=20))
@settings(max_examples=examples(100, thorough=2000), deadline=None)
def test_each_token_counts_for_one_tier_and_no_total_falls(prompts: list[Prompt]) -> None:
    tier, highest = a_tier(), 0

    def hits() -> tuple[int, int]:
        nonlocal highest
        load = tier.reported(LoadReport())
        assert load.engine_hit_tokens_total >= highest
        highest = load.engine_hit_tokens_total
        return load.engine_hit_tokens_total, load.host_hit_tokens_total

    for number, prompt in enumerate(prompts):
        loaded = HostLoaded(str(number), prompt.host_blocks, 1.0)
        if prompt.host_blocks and not prompt.token_first:
            tier.loaded(loaded)
        tier.cached(str(number), (prompt.engine_blocks + prompt.host_blocks) * BLOCK_TOKENS)
        hits()
        if prompt.host_blocks and prompt.token_first:
            tier.loaded(loaded)
        if prompt.reloaded_blocks:
            tier.loaded(HostLoaded(str(number), prompt.reloaded_blocks, 1.0, is_again=True))
        hits()

    many = 1000  # hits of the engine, so that what was counted too much is made up for
    tier.cached("last", many * BLOCK_TOKENS)
    engine_blocks = sum(prompt.engine_blocks for prompt in prompts) + many
    host_blocks = sum(prompt.host_blocks + prompt.reloaded_blocks for prompt in prompts)
    assert hits() == (engine_blocks * BLOCK_TOKENS, host_blocks * BLOCK_TOKENS)


def test_a_load_that_is_known_first_is_no_hit_of_the_engine() -> None:
    tier = a_tier()
    tier.loaded(HostLoaded("a", 3, 1.0))
    tier.cached("a", 3 * BLOCK_TOKENS)
    assert tier.reported(LoadReport()).engine_hit_tokens_total == 0


def test_what_no_prompt_is_known_to_have_had_is_left_as_it_is() -> None:
    tier = a_tier()
    tier.cached("a", None)
    tier.loaded(HostLoaded("a", 3, 1.0))
    load = tier.reported(LoadReport())
    assert (load.engine_hit_tokens_total, load.host_hit_tokens_total) == (0, 3 * BLOCK_TOKENS)
