"""One LLM instance as a model: the same object runs in the cluster simulator and behind the simulated engine.

The world around it owns the clock: it asks for a step, lets the step's duration pass, and says that it is over.
"""

from bisect import bisect_right

import numpy as np

from controlplane.model.instance import KvBlocks, LoadReport
from controlplane.model.request import EngineRequest, TokenDelta
from controlplane.model.running_request import RunningRequest
from controlplane.model.token_intervals import TokenIntervals
from mesh.errors import IllegalTransition, QueueFull, RequestRefused
from simulator.cost.model import BatchShape, CostModel
from simulator.instance.block_pool import NO_CHANGES
from simulator.instance.config import InstanceConfig
from simulator.instance.counted_request import CountedRequest
from simulator.instance.fetcher import Fetcher
from simulator.instance.invariants import check_invariants
from simulator.instance.kv_cache import CachedBlock
from simulator.instance.kv_transfer import KvExport, KvImport, KvImports
from simulator.instance.occupancy import Occupancy
from simulator.instance.scheduler import Scheduler
from simulator.instance.sequence import Sequence, SequenceState, counted_sequence_of, sequence_of
from simulator.instance.step import DecodeRun, StartedRequest, Step, StepResult
from simulator.instance.token_deltas import abort_delta, token_delta


class SimulatedInstance:
    """Continuous batching over finite KV memory, without clock, I/O or randomness."""

    def __init__(
        self, config: InstanceConfig, cost: CostModel, fetcher: Fetcher | None = None, *, times_tokens: bool = True
    ) -> None:
        """`fetcher`: who brings KV that is not cached; None: all of it is computed. Without `times_tokens` its load
        does not tell how long requests wait from one token to the next."""
        self.config = config
        self._cost = cost
        self._scheduler = Scheduler(config, fetcher)
        self._imports = KvImports(self._scheduler.kv)
        self._sequences: dict[str, Sequence] = {}
        self._step: Step | None = None
        self._arrivals = 0
        self._readers = 0
        """Requests with token ids; without any, no delta is made."""
        self._generated_tokens = 0
        self._prefilled_tokens = 0
        self._finished = 0
        self._last_step_ms = 0.0
        self._intervals = TokenIntervals() if times_tokens else None

    def submit(self, request: EngineRequest | CountedRequest) -> None:
        """Queue a request. Raises `RequestRefused` for one that can never be served or whose id is in use, and
        `QueueFull`."""
        if len(self._scheduler.waiting) >= self.config.max_queued_requests:
            raise QueueFull(
                f"request {request.request_id}: the queue of {self.config.max_queued_requests} is full; try "
                "another instance or come back later"
            )
        sequence = self._sequence_of(request)
        self._register(sequence)
        self._scheduler.enqueue(sequence)

    def abort(self, request_id: str) -> TokenDelta | None:
        """Take a request back at once, in the midst of a step too; None if it is unknown or has ended."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        delta = abort_delta(sequence)
        self._imports.forget(sequence)
        self._remove(sequence)
        return delta

    @property
    def request_ids(self) -> tuple[str, ...]:
        """All requests that have not ended."""
        return tuple(self._sequences)

    def plan_step(self, now_ms: float, most_steps: int = 1) -> Step | None:
        """Compose the next step, or None if nothing can be computed. `finish_step` must follow.

        With `most_steps` above 1 the answer may stand for a run of steps that equals planning and finishing them one
        by one, as long as nobody touches the instance. Who does it all the same, or looks, calls `settle` before,
        and to touch it `interrupt`.
        """
        if self._step is not None:
            raise IllegalTransition("a step is planned already; finish it before planning another")
        chunks = self._scheduler.compose()
        decoding = self._scheduler.decoding
        requests = len(decoding.sequences)
        if not chunks and not requests:
            return None
        preempted = self._scheduler.take_preempted()
        shape = BatchShape(
            tuple([chunk.shape for chunk in chunks]), decoding.context_tokens(), decoding.context_tokens_sum
        )
        if most_steps > 1 and not chunks and not preempted:
            most_steps = min(most_steps, decoding.steps_to_next_end())
            if most_steps > 1:
                most_steps = self._scheduler.steps_with_memory(most_steps)
            if most_steps > 1:
                durations_ms = self._cost.decode_run_ms(shape, most_steps)
                # Added one after the other, as by a caller that steps one by one: equal to the last bit.
                ends = durations_ms.copy()
                ends[0] += now_ms
                ends_ms = np.add.accumulate(ends, out=ends).tolist()
                last_ms, run = float(durations_ms[-1]), DecodeRun(durations_ms, ends_ms)
                self._step = Step(now_ms, ends_ms[-1], most_steps, last_ms, (), requests, (), run)
                return self._step
        step_ms = self._cost.step_ms(shape)
        self._step = Step(now_ms, now_ms + step_ms, 1, step_ms, tuple(chunks), requests, preempted)
        return self._step

    def settle(self, now_ms: float) -> KvBlocks:
        """Count the steps of the planned run that are over by `now_ms`: what is then seen of the instance is the same
        as if steps were planned one by one. The step under way is never finished. Returns the change of the prefix
        cache that came with them."""
        step = self._step
        if step is None or (run := step.run) is None or run.ends_ms[run.done] > now_ms:
            return NO_CHANGES
        over = min(bisect_right(run.ends_ms, now_ms, run.done), step.steps - 1)
        if over == run.done:
            return NO_CHANGES
        self._decode_run(step, run, over)
        changes = self._scheduler.kv.pool.take_changes()
        # The next step was composed when the last one ended: it has its blocks.
        self._scheduler.grow(0, 1)
        return changes

    def glance(self, now_ms: float) -> bool | None:
        """Let `load` tell of the steps of the planned run that are over by `now_ms`, without counting them one by one,
        which the next `settle` does for all; whether there are new ones. None where that would miss a change of the
        prefix cache, or no run is under way: settle then.

        Most looks at an instance come in the midst of a run, for no more than its load.
        """
        step = self._step
        if step is None or (run := step.run) is None or not self.is_run_quiet:
            return None
        if run.growth is None:
            run.growth = self._scheduler.decoding.growth_counts()
        over = min(bisect_right(run.ends_ms, now_ms, run.seen), step.steps - 1)
        if over <= run.seen:
            return False
        self._time_run(step, run, over)
        return True

    @property
    def is_run_quiet(self) -> bool:
        """Whether what is planned changes nothing before its last step but how far decodes have come."""
        step = self._step
        if step is None or step.run is None:
            return True
        if step.run.is_quiet is None:
            step.run.is_quiet = self._scheduler.keeps_cache(step.steps)
        return step.run.is_quiet

    def interrupt(self) -> Step | None:
        """Somebody touches the instance now, and `settle` has been called: a planned run ends with the step under
        way. Returns what is left to be finished."""
        if self._step is not None and self._step.steps_left > 1:
            self._step = self._step.interrupted()
        return self._step

    def finish_step(self, step: Step) -> StepResult:
        """The step's duration has passed: count its tokens and end what is done."""
        if step is not self._step:
            raise IllegalTransition("only the step that was planned last can be finished, and only once")
        self._step = None
        decoding = self._scheduler.decoding
        emitted = decoded = step.steps_left * len(decoding)
        if step.run is None:
            self._last_step_ms = step.last_step_ms
            if self._intervals is not None:
                self._intervals.add(len(decoding), step.started_ms, step.ends_ms)
            self._generated_tokens += len(decoding)
            ended = decoding.advance(1)
        else:
            ended = self._decode_run(step, step.run, step.steps)
        deltas = [self._delta(each) for each in decoding.sequences if each.text] if self._readers else []
        started: list[StartedRequest] = []
        for chunk in step.chunks:
            sequence = chunk.sequence
            if sequence.state is not SequenceState.PREFILL:
                continue  # aborted while the step was under way
            self._prefilled_tokens += chunk.shape.new_tokens
            if not self._scheduler.finish_chunk(sequence, chunk.shape.new_tokens):
                continue
            emitted += 1
            if not sequence.started:
                started.append(StartedRequest(sequence.request_id, sequence.cached_prompt_tokens or 0))
            if sequence.text:
                deltas.append(self._delta(sequence))
            sequence.started = True
            if sequence.tokens == sequence.total_tokens:
                ended.append(sequence)
            else:
                self._scheduler.start_decoding(sequence)
        for sequence in ended:
            self._remove(sequence)
        self._generated_tokens += emitted - decoded
        self._finished += len(ended)
        return StepResult(
            emitted_tokens=emitted,
            started=tuple(started),
            finished=tuple(sequence.request_id for sequence in ended),
            preempted=step.preempted,
            kv_blocks=self._scheduler.kv.pool.take_changes(),
            deltas=tuple(deltas),
        )

    def decoding_requests(self) -> list[RunningRequest]:
        """The requests that decode, in the order of their slots."""
        decoding = self._scheduler.decoding
        return [
            RunningRequest(each.request_id, tokens, tokens - each.prompt_tokens)
            for each, tokens in zip(decoding.sequences, decoding.context_tokens().tolist(), strict=True)
        ]

    @property
    def planned(self) -> Step | None:
        """The step that `finish_step` is to be called with; None while none runs."""
        return self._step

    def load(self) -> LoadReport:
        """The load at the last `settle` or `glance`, in O(1)."""
        scheduler, step_ms = self._scheduler, self._last_step_ms
        decoding = len(scheduler.decoding.sequences)
        occupancy = self.occupancy()
        run, ahead = self._seen_ahead()
        if run is not None:
            step_ms = float(run.durations_ms[run.seen - 1])
        return LoadReport(
            running_requests=occupancy.running_requests,
            queued_requests=occupancy.queued_requests,
            queued_prefill_tokens=scheduler.queued_prefill_tokens,
            running_tokens=occupancy.running_tokens,
            kv_blocks_used=occupancy.kv_blocks_used,
            generated_tokens_total=self._generated_tokens + ahead * decoding,
            prefilled_tokens_total=self._prefilled_tokens,
            preemptions_total=scheduler.preemptions,
            step_ms=step_ms,
            finished_requests_total=self._finished,
            decoding_requests=decoding,
            token_interval_ms=self._intervals.mean_ms() if decoding and self._intervals is not None else 0.0,
        )

    def occupancy(self) -> Occupancy:
        """What of the load a recording keeps; see `load`."""
        scheduler = self._scheduler
        decoding, prefilling = len(scheduler.decoding.sequences), scheduler.prefilling
        tokens, blocks = scheduler.decoding.context_tokens_sum, scheduler.kv.pool.held_blocks
        run, ahead = self._seen_ahead()
        if run is not None and run.growth is not None:
            periods, rest = divmod(ahead, self.config.block_tokens)
            tokens += ahead * decoding
            blocks += periods * decoding + run.growth[rest]
        if prefilling:
            tokens += sum([sequence.tokens for sequence in prefilling])
        queued = len(scheduler.waiting) + len(scheduler.fetching)
        return Occupancy(decoding + len(prefilling), queued, tokens, blocks)

    @property
    def cached_hashes(self) -> tuple[int, ...]:
        """Block hashes of the whole prefix cache, changes that no step has reported yet included."""
        return self._scheduler.kv.pool.cached_hashes

    def export(self, request_id: str) -> KvExport:
        """Where a request's KV lies now. Raises `IllegalTransition` for an unknown request."""
        sequence = self._known(request_id)
        computed = self._scheduler.computed_tokens_of(sequence)
        blocks = sequence.blocks[: self._scheduler.kv.blocks_for(computed)]
        return KvExport(tuple(blocks), computed, self._scheduler.tokens_of(sequence))

    def read_block(self, block_id: int) -> bytes:
        """The bytes that a block holds now. Raises `IllegalTransition` if it holds none."""
        if self._imports.awaits(block_id):
            raise IllegalTransition(f"block {block_id} is being imported and not written yet")
        writer = self._scheduler.kv.writer_of(block_id)
        computed = self._scheduler.computed_tokens_of(writer) if writer else 0
        return self._scheduler.kv.block_bytes(block_id, computed)

    def admit_import(self, request: EngineRequest | CountedRequest, computed_tokens: int) -> KvImport:
        """Reserve memory for a request whose first `computed_tokens` tokens have their KV elsewhere.

        It runs once its blocks are written and `complete_import` was called; `abort` gives it up. Raises
        `RequestRefused` where there is no room now.
        """
        sequence = self._sequence_of(request)
        kv = self._scheduler.kv
        if not 0 <= computed_tokens < sequence.tokens:
            raise RequestRefused(
                f"request {request.request_id}: {computed_tokens} of {sequence.tokens} tokens are computed; at "
                "least the last one must be left"
            )
        prefix = kv.cached_prefix(sequence)
        # All that its admission needs is reserved now: no import ever waits for memory while holding some.
        if not kv.fits(prefix, kv.blocks_for(sequence.tokens)):
            raise RequestRefused(f"request {request.request_id}: too few free KV blocks for its import")
        sequence.state = SequenceState.IMPORTING
        self._register(sequence)
        self._scheduler.take_prefix(sequence, prefix)
        kv.grow(sequence, sequence.tokens)
        sequence.computed_tokens = max(computed_tokens, sequence.computed_tokens)
        return self._imports.expect(sequence, len(prefix))

    def write_block(self, block_id: int, content: bytes) -> None:
        """Fill an imported block. Raises `KvBlockCorrupt` if the content is not what its tokens say."""
        self._imports.write(block_id, content)

    def extend_import(self, request_id: str, computed_tokens: int) -> KvImport:
        """The former instance has gone on: await the blocks of its tokens up to `computed_tokens`.

        The last block of the step before must have been full. Raises `RequestRefused` where there is no room.
        """
        sequence = self._importing(request_id)
        kv = self._scheduler.kv
        done_blocks, partly = divmod(sequence.computed_tokens, self.config.block_tokens)
        if computed_tokens <= sequence.computed_tokens:
            return KvImport((), done_blocks, sequence.computed_tokens)
        if partly:
            raise IllegalTransition(f"{sequence.story()} cannot be extended: its last block is partly filled")
        if kv.blocks_for(computed_tokens) - len(sequence.blocks) > kv.pool.free_blocks:
            raise RequestRefused(f"request {request_id}: too few free KV blocks for what it has grown to")
        kv.grow(sequence, computed_tokens)
        sequence.computed_tokens = computed_tokens
        return self._imports.expect(sequence, done_blocks)

    def complete_import(self, request_id: str, tokens: int = 0) -> None:
        """Every block is written: the request joins the queue, ahead of those that hold no KV. `tokens` counts its
        prompt and generated tokens by now, if they have become more since it was admitted."""
        sequence = self._importing(request_id)
        missing = self._imports.missing(sequence)
        if missing:
            raise IllegalTransition(f"{sequence.story()} cannot start: blocks {missing} are not written")
        sequence.tokens = sequence.reported_tokens = max(sequence.tokens, tokens)
        if not sequence.computed_tokens < sequence.tokens < sequence.total_tokens:
            raise IllegalTransition(f"{sequence.story()} cannot start: nothing is left to compute")
        sequence.started = sequence.tokens > sequence.prompt_tokens
        self._scheduler.kv.remember(sequence, sequence.computed_tokens)
        self._scheduler.resume(sequence)

    def cached_blocks(self, request: EngineRequest | CountedRequest) -> int:
        """Leading full blocks of a prompt that the prefix cache has; never those of all its tokens, since the last one
        must be computed."""
        return len(self._scheduler.kv.cached_prefix(self._sequence_of(request)))

    def is_to_compute(self, chain: tuple[int, ...]) -> bool:
        """See `Scheduler.is_to_compute`."""
        return self._scheduler.is_to_compute(chain)

    def hold_prefix(self, request: EngineRequest | CountedRequest, most_blocks: int) -> tuple[int, ...]:
        """Keep the leading blocks of a prompt that are cached, as far as they go, until `abort`; under the request's
        id, which must be one of its own. Of blocks that nobody holds at most half of those that are free are kept: the
        requests that run here need room too."""
        sequence = self._sequence_of(request)
        kv = self._scheduler.kv
        prefix, may_take = list[int](), kv.pool.free_blocks // 2
        for block in kv.cached_prefix(sequence)[:most_blocks]:
            may_take -= not kv.pool.holders_of(block)
            if may_take < 0:
                break
            prefix.append(block)
        sequence.state = SequenceState.HOLDING
        self._register(sequence)
        kv.take_prefix(sequence, prefix)
        return tuple(prefix)

    def admit_carrier(self, request: EngineRequest | CountedRequest, blocks: int) -> KvImport:
        """Reserve memory for the first `blocks` blocks of a prompt, whose KV is elsewhere, under the request's id,
        which must be one of its own. `store_carried` leaves them in the prefix cache, `abort` gives them up. Raises
        `RequestRefused` where there is no room now."""
        sequence = self._sequence_of(request)
        kv = self._scheduler.kv
        prefix = kv.cached_prefix(sequence)[:blocks]
        if not kv.fits(prefix, blocks):
            raise RequestRefused(f"{blocks} blocks of a prefix are to come, and {kv.pool.free_blocks} are free")
        sequence.state = SequenceState.IMPORTING
        self._register(sequence)
        kv.take_prefix(sequence, prefix)
        sequence.computed_tokens = blocks * self.config.block_tokens
        kv.grow(sequence, sequence.computed_tokens)
        return self._imports.expect(sequence, len(prefix))

    def store_carried(self, request_id: str) -> None:
        """Every block of a carrier is written: they are in the prefix cache from now on, and the carrier is gone."""
        sequence = self._importing(request_id)
        missing = self._imports.missing(sequence)
        if missing:
            raise IllegalTransition(f"{sequence.story()} cannot be stored: blocks {missing} are not written")
        self._scheduler.kv.remember(sequence, sequence.computed_tokens)
        self._remove(sequence)

    def cached_block(self, block_hash: int) -> CachedBlock | None:
        """What is cached under a hash, where its tokens are known."""
        return self._scheduler.kv.cached_block(block_hash)

    def fetched(self, request_id: str, blocks: int) -> None:
        """The fetcher has brought a request that many leading blocks; the rest of its prompt is computed."""
        self._scheduler.fetched(self._importing(request_id), blocks)

    def state_of(self, request_id: str) -> SequenceState:
        """The request's state; ENDED for an unknown one."""
        sequence = self._sequences.get(request_id)
        return SequenceState.ENDED if sequence is None else sequence.state

    def generated_tokens(self, request_id: str) -> int:
        """How many tokens a request has generated, here and elsewhere."""
        sequence = self._known(request_id)
        return self._scheduler.tokens_of(sequence) - sequence.prompt_tokens

    def generated_token_ids(self, request_id: str) -> tuple[int, ...]:
        """All that a request with token ids has generated, here and elsewhere."""
        sequence = self._known(request_id)
        if sequence.text is None:
            raise IllegalTransition(f"{sequence.story()} has no token ids")
        return tuple(sequence.text.between(sequence.prompt_tokens, self._scheduler.tokens_of(sequence)).tolist())

    def pause(self, request_id: str) -> None:
        """Let a decoding request stand still, with its KV, until `resume` or `abort`. Not during a step."""
        if self._step is not None:
            raise IllegalTransition(f"request {request_id} cannot be paused in the midst of a step")
        self._scheduler.pause(self._known(request_id))

    def resume(self, request_id: str) -> None:
        """Let a paused request go on, ahead of those that hold no KV."""
        sequence = self._known(request_id)
        if sequence.state is not SequenceState.PAUSED:
            raise IllegalTransition(f"{sequence.story()} is not paused")
        self._scheduler.resume(sequence)

    def validate(self) -> None:
        """Raises `IllegalTransition` where an invariant is broken; for tests."""
        check_invariants(self._scheduler, self._sequences)

    def _decode_run(self, step: Step, run: DecodeRun, over: int) -> list[Sequence]:
        """The first `over` steps of the run are done; returns the requests that end with them."""
        decoding, done = self._scheduler.decoding, run.done
        self._last_step_ms = float(run.durations_ms[over - 1])
        if over > run.seen:
            self._time_run(step, run, over)
        self._scheduler.grow(1, over - done)
        self._generated_tokens += (over - done) * len(decoding)
        run.done, run.growth = over, None
        return decoding.advance(over - done)

    def _seen_ahead(self) -> tuple[DecodeRun | None, int]:
        """The run under way and how many of its steps `load` tells of that are not counted; None where it has none."""
        run = None if self._step is None else self._step.run
        if run is None or not run.growth or run.seen <= run.done:
            return None, 0
        return run, run.seen - run.done

    def _time_run(self, step: Step, run: DecodeRun, over: int) -> None:
        """Intervals between tokens, up to the end of step `over` of the run."""
        if self._intervals is not None:
            began_ms = run.ends_ms[run.seen - 1] if run.seen else step.started_ms
            self._intervals.add_run(len(self._scheduler.decoding), began_ms, run.ends_ms[run.seen : over])
        run.seen = over

    def _delta(self, sequence: Sequence) -> TokenDelta:
        return token_delta(sequence, self._scheduler.tokens_of(sequence))

    def _sequence_of(self, request: EngineRequest | CountedRequest) -> Sequence:
        if request.request_id in self._sequences:
            raise RequestRefused(f"request {request.request_id}: this id is in use; choose another")
        if isinstance(request, CountedRequest):
            return counted_sequence_of(request, self.config)
        return sequence_of(request, self.config)

    def _register(self, sequence: Sequence) -> None:
        self._arrivals += 1
        sequence.arrival = self._arrivals
        self._sequences[sequence.request_id] = sequence
        self._readers += sequence.text is not None

    def _remove(self, sequence: Sequence) -> None:
        self._scheduler.end(sequence)
        del self._sequences[sequence.request_id]
        self._readers -= sequence.text is not None

    def _importing(self, request_id: str) -> Sequence:
        sequence = self._known(request_id)
        if sequence.state is not SequenceState.IMPORTING:
            raise IllegalTransition(f"{sequence.story()} is not being imported")
        return sequence

    def _known(self, request_id: str) -> Sequence:
        sequence = self._sequences.get(request_id)
        if sequence is None:
            raise IllegalTransition(f"request {request_id} is unknown here or has ended")
        return sequence
