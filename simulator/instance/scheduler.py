"""Which request computes what in the next step, as vLLM V1 decides it.

One token budget a step, shared by decodes (one token each) and prompt chunks; running requests come before
waiting ones; who runs out of memory preempts the request that is served last. Since a chunk that the budget
cuts short leaves nothing for another, at most one request is partly prefilled between steps.

Two differences from vLLM are known: its FCFS policy preempts the request admitted last, while here as under its
priority policy it is the one with the largest (priority, arrival); and a block that decoding fills enters the
prefix cache one step later than there.
"""

from heapq import heappop, heappush

from simulator.cost.model import PrefillChunk
from simulator.instance.config import InstanceConfig
from simulator.instance.decode_batch import DecodeBatch
from simulator.instance.fetcher import Fetcher
from simulator.instance.kv_cache import KvCache
from simulator.instance.sequence import Sequence, SequenceState
from simulator.instance.step import ScheduledChunk

# Requests that wait for admission, in the order in which they will be admitted.


class WaitingQueue:
    """First requests that hold imported KV (their memory is paid for), then by priority, then by arrival.

    A preempted request keeps its arrival and so goes before what came later. Withdrawn requests stay in the
    heap until they reach its head, or until they are the majority; they are told by their state.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[bool, int, int, Sequence]] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, sequence: Sequence) -> None:
        """Add a request in state WAITING."""
        heappush(self._heap, (not sequence.blocks, sequence.priority, sequence.arrival, sequence))
        self._length += 1

    def head(self) -> Sequence | None:
        """The next request to admit."""
        heap = self._heap
        while heap and heap[0][3].state is not SequenceState.WAITING:
            heappop(heap)
        return heap[0][3] if heap else None

    def pop(self) -> Sequence:
        """Take the head out; call while it is still WAITING."""
        self._length -= 1
        return heappop(self._heap)[3]

    def withdraw(self) -> None:
        """Count one request less, whose state is WAITING no more."""
        self._length -= 1
        if len(self._heap) > 2 * self._length + 64:
            self._heap = sorted(entry for entry in self._heap if entry[3].state is SequenceState.WAITING)

    def sequences(self) -> list[Sequence]:
        """All waiting requests, in no particular order."""
        return [entry[3] for entry in self._heap if entry[3].state is SequenceState.WAITING]


class Scheduler:
    """The waiting and the running requests of an instance, and the memory they share."""

    def __init__(self, config: InstanceConfig, fetcher: Fetcher | None = None) -> None:
        self.kv = KvCache(config)
        self.waiting = WaitingQueue()
        self.prefilling: list[Sequence] = []
        """Running requests whose prompt is not computed yet."""
        self.decoding = DecodeBatch(config.max_batch_requests, config.block_tokens)
        self.fetching: set[str] = set()
        """Requests whose KV is being brought; they wait like those in the queue."""
        self.queued_prefill_tokens = 0
        self.preemptions = 0
        self._config = config
        self._fetcher = fetcher
        self._preempted: list[str] = []

    @property
    def running_requests(self) -> int:
        """Requests that take part in steps."""
        return len(self.decoding) + len(self.prefilling)

    def tokens_of(self, sequence: Sequence) -> int:
        """Prompt and generated tokens of a request in any state."""
        if sequence.state is SequenceState.DECODE:
            return self.decoding.tokens_of(sequence)
        return sequence.tokens

    def computed_tokens_of(self, sequence: Sequence) -> int:
        """Tokens of a request in any state whose KV is there."""
        if sequence.state is SequenceState.DECODE:
            return self.decoding.tokens_of(sequence) - 1
        return sequence.computed_tokens

    def is_to_compute(self, chain: tuple[int, ...]) -> bool:
        """Whether a request that has not begun is about to compute these leading blocks, as far as they are not
        cached."""
        last = len(chain) - 1
        return any(
            not sequence.started and len(sequence.hashes) > last and sequence.hashes[last] == chain[last]
            for sequence in (*self.waiting.sequences(), *self.prefilling)
        )

    def enqueue(self, sequence: Sequence) -> None:
        """A request in state WAITING asks to run."""
        computed = sequence.computed_tokens
        if not sequence.blocks:
            blocks = len(self.kv.cached_prefix(sequence))
            if self._fetcher is not None:
                promised = self._fetcher.promised(sequence.request_id, sequence.hashes)
                blocks = max(blocks, min(promised, (sequence.tokens - 1) // self._config.block_tokens))
            computed = blocks * self._config.block_tokens
        self._set_queued(sequence, sequence.tokens - computed)
        self.waiting.push(sequence)

    def compose(self) -> list[ScheduledChunk]:
        """The chunks of the next step; everyone in `decoding` decodes one token beside them."""
        preemptions = self.preemptions
        self._grow_decoding()
        chunks = self._continue_prefill()
        # As in vLLM, a step that had to preempt admits nobody; unless nothing at all would run then.
        if len(self.waiting) and (self.preemptions == preemptions or not self.running_requests):
            budget = self._config.max_step_tokens - len(self.decoding)
            self._admit_waiting(chunks, budget - sum([chunk.shape.new_tokens for chunk in chunks]))
        return chunks

    def take_preempted(self) -> tuple[str, ...]:
        """Requests preempted since the last call."""
        if not self._preempted:
            return ()
        preempted, self._preempted = tuple(self._preempted), []
        return preempted

    def steps_with_memory(self, most_steps: int) -> int:
        """How many steps in a row, at most so many, the decodes have blocks for and nobody in the queue can join.

        Within a run nothing frees blocks, so a request at the head of the queue that lacks memory lacks it to the
        end of the run; only a block new to the prefix cache could help it.
        """
        decoding, period = self.decoding, self._config.block_tokens
        if len(self.waiting) and decoding.cache_growers:
            for ahead in range(1, min(period + 1, most_steps)):
                due = decoding.due_for_growth(ahead)
                if any(self.kv.has_hash_for(each, len(each.blocks) - 1) for each in due):
                    most_steps = ahead
                    break
        # Each request outgrows its blocks once every `block_tokens` steps, so the need of one period repeats.
        periods, left_blocks = divmod(self.kv.pool.free_blocks, len(decoding))
        if periods * period >= most_steps - 1:
            return most_steps
        for ahead in range(1, period + 1):
            left_blocks -= len(decoding.due_for_growth(ahead))
            if left_blocks < 0:
                return min(most_steps, periods * period + ahead)
        return most_steps

    def keeps_cache(self, steps: int) -> bool:
        """Whether so many steps that only decode leave the prefix cache as it is."""
        most_blocks = (steps // self._config.block_tokens + 1) * len(self.decoding)
        return not self.decoding.cache_growers and self.kv.pool.hands_out_unseen(most_blocks)

    def grow(self, first_ahead: int, stop_ahead: int) -> None:
        """Give the decodes the blocks of the steps first_ahead .. stop_ahead - 1 from now, known to be free.

        Where no block has a place in the prefix cache to lose or to get, all blocks of a request are handed out at
        once: which request gets which does not show.
        """
        decoding, period = self.decoding, self._config.block_tokens
        most_blocks = len(decoding) * ((stop_ahead - first_ahead) // period + 1)
        is_long = stop_ahead - first_ahead > period
        if is_long and not decoding.cache_growers and self.kv.pool.hands_out_unseen(most_blocks):
            stop = decoding.clock + stop_ahead
            for sequence in decoding.sequences:
                missing = (stop - 1 - sequence.growth_due) // period + 1
                if missing > 0:
                    self.kv.grow(sequence, (len(sequence.blocks) + missing) * period)
                    decoding.file_growth(sequence)
            return
        for ahead in decoding.growth_ahead(first_ahead, stop_ahead):
            self._give_decode_blocks(decoding.due_for_growth(ahead), ahead)

    def finish_chunk(self, sequence: Sequence, new_tokens: int) -> bool:
        """A chunk is computed; True if the prompt is complete and the request has its next token."""
        sequence.computed_tokens += new_tokens
        self._set_queued(sequence, sequence.tokens - sequence.computed_tokens)
        if sequence.computed_tokens < sequence.tokens:
            return False
        sequence.tokens += 1
        return True

    def start_decoding(self, sequence: Sequence) -> None:
        """Its prompt is computed and its first token is out."""
        self.prefilling.remove(sequence)
        sequence.move_to(SequenceState.DECODE)
        self.decoding.join(sequence)

    def pause(self, sequence: Sequence) -> None:
        """Take a decoding request out of the batch, with its blocks."""
        self.decoding.leave(sequence)
        sequence.move_to(SequenceState.PAUSED)

    def resume(self, sequence: Sequence) -> None:
        """Queue a request that stands still with its KV. Where memory lacks for its next token it loses its
        blocks, as if it were preempted: whoever waits in the queue with blocks never lacks any."""
        if self.kv.blocks_for(sequence.tokens) - len(sequence.blocks) > self.kv.pool.free_blocks:
            self.kv.release(sequence)
            sequence.computed_tokens = 0
        else:
            self.kv.grow(sequence, sequence.tokens)
        sequence.move_to(SequenceState.WAITING)
        self.enqueue(sequence)

    def end(self, sequence: Sequence) -> None:
        """Remove a request in any state and free its memory."""
        was_waiting = sequence.state is SequenceState.WAITING
        if sequence.state is SequenceState.IMPORTING:
            sequence.computed_tokens = 0  # what was not written must not enter the prefix cache
        self._stop_running(sequence)
        self.fetching.discard(sequence.request_id)
        sequence.move_to(SequenceState.ENDED)
        if was_waiting:
            self.waiting.withdraw()
        self._set_queued(sequence, 0)
        self.kv.release(sequence)

    def take_prefix(self, sequence: Sequence, prefix: list[int]) -> None:
        """Give a request the cached blocks of its prefix."""
        self.kv.take_prefix(sequence, prefix)
        if sequence.cached_prompt_tokens is None:
            sequence.cached_prompt_tokens = min(sequence.computed_tokens, sequence.prompt_tokens)

    def _grow_decoding(self) -> None:
        if not self.decoding.sequences:
            return
        due = self.decoding.due_for_growth(0)
        if len(due) <= self.kv.pool.free_blocks:
            self._give_decode_blocks(due, 0)
            return
        for sequence in due:
            # An earlier one in this loop may have preempted it.
            if sequence.state is SequenceState.DECODE and self._make_room(sequence, 1):
                self._give_decode_block(sequence)

    def _give_decode_blocks(self, due: list[Sequence], ahead: int) -> None:
        """All that are due in the step after the next `ahead` get their block, which is free for each."""
        if not due:
            return
        if self.decoding.cache_growers:
            for sequence in due:
                self._give_decode_block(sequence)
            return
        self.kv.grow_each(due)
        self.decoding.postpone_growth(due, ahead)

    def _give_decode_block(self, sequence: Sequence) -> None:
        full_tokens = len(sequence.blocks) * self._config.block_tokens
        if sequence.grows_cache:
            self.kv.remember(sequence, full_tokens)
        self.kv.grow(sequence, full_tokens + 1)
        self.decoding.file_growth(sequence)

    def _continue_prefill(self) -> list[ScheduledChunk]:
        if not self.prefilling:
            return []
        (sequence,) = self.prefilling
        budget = self._config.max_step_tokens - len(self.decoding)
        new_tokens = min(budget, sequence.tokens - sequence.computed_tokens)
        missing = self.kv.blocks_for(sequence.computed_tokens + new_tokens) - len(sequence.blocks)
        if not self._make_room(sequence, missing):
            return []
        return [self._schedule(sequence, new_tokens)]

    def _admit_waiting(self, chunks: list[ScheduledChunk], budget: int) -> None:
        while budget > 0 and self.running_requests < self._config.max_batch_requests:
            sequence = self.waiting.head()
            if sequence is None:
                return
            if not sequence.blocks:
                prefix = self.kv.cached_prefix(sequence)
                computed = len(prefix) * self._config.block_tokens
                new_tokens = min(budget, sequence.tokens - computed)
                whole = self._config.whole_prompt_must_fit
                must_fit = sequence.tokens if whole else computed + new_tokens
                if not self.kv.fits(prefix, self.kv.blocks_for(must_fit)):
                    return
                if self._fetch(sequence, prefix):
                    continue
                self.take_prefix(sequence, prefix)
            new_tokens = min(budget, sequence.tokens - sequence.computed_tokens)
            self.waiting.pop()
            sequence.move_to(SequenceState.PREFILL)
            self.prefilling.append(sequence)
            self._set_queued(sequence, sequence.tokens - sequence.computed_tokens)
            chunks.append(self._schedule(sequence, new_tokens))
            budget -= new_tokens

    def _fetch(self, sequence: Sequence, prefix: list[int]) -> bool:
        """Have more of its prefix brought than is cached, if that can be; it then holds the memory for its whole prompt
        and is out of the queue until `fetched`."""
        if self._fetcher is None or not self.kv.fits(prefix, self.kv.blocks_for(sequence.tokens)):
            return False
        most = (sequence.tokens - 1) // self._config.block_tokens
        blocks = self._fetcher.fetch(sequence.request_id, sequence.hashes[:most], len(prefix))
        if blocks <= len(prefix):
            return False
        self.waiting.pop()
        sequence.move_to(SequenceState.IMPORTING)
        self.fetching.add(sequence.request_id)
        self.kv.take_prefix(sequence, prefix)
        self.kv.grow(sequence, sequence.tokens)
        self._set_queued(sequence, sequence.tokens - blocks * self._config.block_tokens)
        return True

    def fetched(self, sequence: Sequence, blocks: int) -> None:
        """So many leading blocks are there; it goes on ahead of those that hold no memory."""
        self.fetching.remove(sequence.request_id)
        tokens = max(sequence.computed_tokens, blocks * self._config.block_tokens)
        if sequence.cached_prompt_tokens is None:
            sequence.cached_prompt_tokens = min(tokens, sequence.prompt_tokens)
        sequence.computed_tokens = tokens
        self.kv.remember(sequence, tokens)
        sequence.move_to(SequenceState.WAITING)
        self.enqueue(sequence)

    def _schedule(self, sequence: Sequence, new_tokens: int) -> ScheduledChunk:
        computed = sequence.computed_tokens
        self.kv.grow(sequence, computed + new_tokens)
        # Cached when scheduled, as in vLLM: a later request of the same step shares the blocks already.
        self.kv.remember(sequence, computed + new_tokens)
        return ScheduledChunk(sequence, sequence.request_id, PrefillChunk(new_tokens, computed))

    def _make_room(self, sequence: Sequence, blocks: int) -> bool:
        """Preempt until `blocks` are free; False if the request itself had to go."""
        while self.kv.pool.free_blocks < blocks:
            victim = max((*self.decoding.sequences, *self.prefilling), key=_key)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._stop_running(sequence)
        sequence.move_to(SequenceState.WAITING)
        self.kv.name_own_blocks(sequence)
        self.kv.release(sequence)
        sequence.computed_tokens = 0
        self.preemptions += 1
        self._preempted.append(sequence.request_id)
        self.enqueue(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.DECODE:
            self.decoding.leave(sequence)
        elif sequence.state is SequenceState.PREFILL:
            self.prefilling.remove(sequence)

    def _set_queued(self, sequence: Sequence, tokens: int) -> None:
        self.queued_prefill_tokens += tokens - sequence.queued_tokens
        sequence.queued_tokens = tokens


def _key(sequence: Sequence) -> tuple[int, int]:
    return sequence.key
