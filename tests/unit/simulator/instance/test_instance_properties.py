"""Whatever is asked of an instance in whatever order, its books balance and every request says what it would alone."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from controlplane.model.request import EngineRequest, FinishReason, SamplingParams, TokenDelta
from mesh.errors import KvBlockCorrupt, RequestRefused
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig, OutputConfig
from simulator.instance.instance import SimulatedInstance
from simulator.instance.sequence import SequenceState
from simulator.instance.step import Step
from tests.examples import examples

OUTPUT = OutputConfig(
    vocabulary_tokens=50, first_token_id=3, last_token_id=49, median_tokens=8, sigma=1.0, longest_tokens=40
)
ROOMY = InstanceConfig(
    block_tokens=4, kv_blocks=1000, max_model_len_tokens=60, max_step_tokens=64, max_batch_requests=8, output=OUTPUT
)


def undisturbed(request: EngineRequest) -> list[TokenDelta]:
    """The request alone on an instance with all the memory it wants."""
    instance = SimulatedInstance(ROOMY, LinearCost())
    instance.submit(request)
    deltas: list[TokenDelta] = []
    for _ in range(ROOMY.max_model_len_tokens):
        step = instance.plan_step(0.0)
        if step is None:
            return deltas
        deltas += instance.finish_step(step).deltas
    raise AssertionError("a lone request did not end")


requests = st.builds(
    lambda prefix, tail, max_tokens, min_share, seed, stop, ignore_eos, priority: EngineRequest(
        request_id="",
        # Few distinct prefixes, so that requests share blocks.
        prompt_token_ids=tuple([3 + prefix] * 13) + tuple(tail),
        sampling=SamplingParams(
            max_tokens=max_tokens,
            min_tokens=int(min_share * max_tokens),
            temperature=1.0,
            seed=seed,
            stop_token_ids=stop,
            ignore_eos=ignore_eos,
        ),
        priority=priority,
    ),
    prefix=st.integers(0, 2),
    tail=st.lists(st.integers(3, 49), max_size=12),
    max_tokens=st.integers(1, 40),
    min_share=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    seed=st.sampled_from([None, 1, 2]),
    stop=st.sampled_from([(), (7,), (7, 20, 30)]),
    ignore_eos=st.booleans(),
    priority=st.integers(0, 1),
)


class InstanceMachine(RuleBasedStateMachine):
    """One instance under load, one elsewhere from which requests with KV come."""

    @initialize(
        kv_blocks=st.integers(15, 40),
        max_batch_requests=st.integers(1, 6),
        extra_step_tokens=st.integers(0, 20),
        whole_prompt_must_fit=st.booleans(),
    )
    def build(
        self, kv_blocks: int, max_batch_requests: int, extra_step_tokens: int, whole_prompt_must_fit: bool
    ) -> None:
        self.instance = SimulatedInstance(
            replace(
                ROOMY,
                kv_blocks=kv_blocks,
                max_batch_requests=max_batch_requests,
                max_step_tokens=max_batch_requests + extra_step_tokens,
                whole_prompt_must_fit=whole_prompt_must_fit,
            ),
            LinearCost(),
        )
        self.step: Step | None = None
        self.submitted: dict[str, EngineRequest] = {}
        self.said: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.importing: set[str] = set()
        self.paused: set[str] = set()
        self.cached: set[int] = set()

    @rule(request=requests)
    def submit(self, request: EngineRequest) -> None:
        request = self._named(request)
        self.instance.submit(request)
        self._note(request)

    @rule(request=requests, share=st.floats(0, 1))
    def submit_continuation(self, request: EngineRequest, share: float) -> None:
        whole = [token for delta in undisturbed(request) for token in delta.token_ids]
        emitted = tuple(whole[: int(share * (len(whole) - 1))])
        request = replace(self._named(request), emitted_token_ids=emitted)
        self.instance.submit(request)
        self._note(request)

    @rule(request=requests, share=st.floats(0, 1), flipped=st.booleans())
    def import_with_kv(self, request: EngineRequest, share: float, flipped: bool) -> None:
        source = SimulatedInstance(ROOMY, LinearCost())
        source.submit(self._named(request))
        whole = sum(len(delta.token_ids) for delta in undisturbed(request))
        said: list[int] = []
        while len(said) < int(share * (whole - 1)):
            step = source.plan_step(0.0)
            assert step is not None
            said += [token for delta in source.finish_step(step).deltas for token in delta.token_ids]
        request = replace(self._named(request), emitted_token_ids=tuple(said))
        exported = source.export(request.request_id)
        try:
            wanted = self.instance.admit_import(request, min(exported.computed_tokens, exported.tokens - 1))
        except RequestRefused:
            return  # no room: a fair answer
        self._note(request)
        self.importing.add(request.request_id)
        sent = exported.block_ids[wanted.first_block : wanted.first_block + len(wanted.block_ids)]
        for block, remote in zip(wanted.block_ids, sent, strict=True):
            content = source.read_block(remote)
            if flipped:
                torn = content[:-1] + bytes([content[-1] ^ 1])
                with pytest.raises(KvBlockCorrupt):
                    self.instance.write_block(block, torn)
            self.instance.write_block(block, content)
            assert self.instance.read_block(block) == content

    @rule(request=requests, shares=st.lists(st.floats(0, 1), min_size=1, max_size=4).map(sorted))
    def import_in_rounds(self, request: EngineRequest, shares: list[float]) -> None:
        """As a live migration does: the source goes on between the rounds, and only the last block is partial."""
        source = SimulatedInstance(ROOMY, LinearCost())
        request = self._named(request)
        whole = sum(len(delta.token_ids) for delta in undisturbed(request))
        source.submit(request)
        try:
            wanted = self.instance.admit_import(request, 0)
        except RequestRefused:
            return  # no room: a fair answer
        self._note(request)
        for number, share in enumerate(shares, start=1):
            while len(self.said[request.request_id]) < int(share * (whole - 1)):
                step = source.plan_step(0.0)
                assert step is not None
                for delta in source.finish_step(step).deltas:
                    self.said[request.request_id] += delta.token_ids
            exported = source.export(request.request_id)
            computed = min(exported.computed_tokens, exported.tokens - 1)
            if number < len(shares):
                computed -= computed % ROOMY.block_tokens
            try:
                wanted = self.instance.extend_import(request.request_id, computed)
            except RequestRefused:
                assert self.instance.abort(request.request_id) is not None
                self.submitted.pop(request.request_id)
                self.said.pop(request.request_id)
                return
            sent = exported.block_ids[wanted.first_block :]
            for block, remote in zip(wanted.block_ids, sent[: len(wanted.block_ids)], strict=True):
                self.instance.write_block(block, source.read_block(remote))
        self.instance.complete_import(request.request_id, source.export(request.request_id).tokens)

    @precondition(lambda self: self.step is None and bool(self._decoding()))
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self._decoding()))
        self.instance.pause(request_id)
        assert list(self.instance.generated_token_ids(request_id)) == self.said[request_id]
        self.paused.add(request_id)

    @precondition(lambda self: bool(self.paused))
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.paused)))
        self.paused.discard(request_id)
        self.instance.resume(request_id)

    @precondition(lambda self: bool(self.importing))
    @rule(data=st.data())
    def complete_import(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.importing)))
        self.importing.discard(request_id)
        self.instance.complete_import(request_id)

    @precondition(lambda self: bool(set(self.submitted) - set(self.ended)))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(set(self.submitted) - set(self.ended))))
        delta = self.instance.abort(request_id)
        assert delta is not None
        self.importing.discard(request_id)
        self.paused.discard(request_id)
        self._hear(delta)
        assert self.instance.abort(request_id) is None

    @precondition(lambda self: self.step is None)
    @rule()
    def plan(self) -> None:
        self.step = self.instance.plan_step(0.0)
        if self.step is not None:
            config = self.instance.config
            chunk_tokens = sum(chunk.shape.new_tokens for chunk in self.step.chunks)
            assert chunk_tokens + self.step.decode_requests <= config.max_step_tokens
            assert len(self.step.chunks) + self.step.decode_requests <= config.max_batch_requests

    @precondition(lambda self: self.step is not None)
    @rule()
    def finish(self) -> None:
        assert self.step is not None
        result = self.instance.finish_step(self.step)
        self.step = None
        for delta in result.deltas:
            self._hear(delta)
        assert set(result.finished) <= set(self.ended)
        assert not set(result.kv_blocks.removed) & set(result.kv_blocks.stored)
        assert set(result.kv_blocks.removed) <= self.cached
        assert not set(result.kv_blocks.stored) & self.cached
        self.cached -= set(result.kv_blocks.removed)
        self.cached |= set(result.kv_blocks.stored)
        assert self.cached == set(self.instance.cached_hashes)

    @invariant()
    def books_balance(self) -> None:
        self.instance.validate()
        load = self.instance.load()
        running = len(self.submitted) - len(self.ended) - len(self.importing) - len(self.paused)
        assert load.running_requests + load.queued_requests == running
        assert load.kv_blocks_used <= self.instance.config.kv_blocks

    def teardown(self) -> None:
        """Left alone, every request comes to its right end and nothing is left over."""
        if not hasattr(self, "instance"):
            return
        for request_id in self.importing:
            self.instance.complete_import(request_id)
        self.importing.clear()
        for request_id in self.paused:
            self.instance.resume(request_id)
        self.paused.clear()
        for _ in range(20_000):
            if self.step is None:
                self.plan()
            if self.step is None:
                break
            self.finish()
            self.books_balance()
        assert set(self.ended) == set(self.submitted)
        load = self.instance.load()
        assert (load.running_requests, load.queued_requests, load.queued_prefill_tokens) == (0, 0, 0)
        assert (load.running_tokens, load.kv_blocks_used) == (0, 0)
        for request_id, request in self.submitted.items():
            alone = undisturbed(replace(request, emitted_token_ids=()))
            whole = [token for delta in alone for token in delta.token_ids]
            if self.ended[request_id] is FinishReason.ABORT:
                assert self.said[request_id] == whole[: len(self.said[request_id])]
            else:
                assert self.said[request_id] == whole
                assert self.ended[request_id] is alone[-1].finish_reason

    def _named(self, request: EngineRequest) -> EngineRequest:
        return replace(request, request_id=f"r{len(self.submitted)}")

    def _note(self, request: EngineRequest) -> None:
        self.submitted[request.request_id] = request
        self.said[request.request_id] = list(request.emitted_token_ids)

    def _decoding(self) -> list[str]:
        return [each for each in self.submitted if self.instance.state_of(each) is SequenceState.DECODE]

    def _hear(self, delta: TokenDelta) -> None:
        assert delta.request_id not in self.ended
        assert delta.offset == len(self.said[delta.request_id])
        self.said[delta.request_id] += delta.token_ids
        if delta.finish_reason is not None:
            self.ended[delta.request_id] = delta.finish_reason


TestInstance = InstanceMachine.TestCase
TestInstance.settings = settings(max_examples=examples(60), stateful_step_count=60, deadline=None)
