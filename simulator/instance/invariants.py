"""What must hold of an instance after every event; tests ask for it, production does not pay for it."""

from collections import Counter
from collections.abc import Mapping

from mesh.errors import IllegalTransition
from simulator.instance.scheduler import Scheduler
from simulator.instance.sequence import Sequence, SequenceState


def check_invariants(scheduler: Scheduler, sequences: Mapping[str, Sequence]) -> None:
    """Raises `IllegalTransition` telling which book does not balance, with the story of the request."""
    scheduler.kv.pool.validate()
    _check_ownership(scheduler, sequences)
    _check_places(scheduler, sequences)
    _check_counters(scheduler, sequences)


def _check_ownership(scheduler: Scheduler, sequences: Mapping[str, Sequence]) -> None:
    pool = scheduler.kv.pool
    holders = Counter(block for sequence in sequences.values() for block in sequence.blocks)
    for block, count in holders.items():
        if pool.holders_of(block) != count:
            raise IllegalTransition(f"block {block} counts {pool.holders_of(block)} holders, {count} requests hold it")
    if len(holders) != pool.held_blocks:
        raise IllegalTransition(f"{pool.held_blocks} blocks are held, the requests hold {len(holders)}")
    for sequence in sequences.values():
        if len(set(sequence.blocks)) != len(sequence.blocks):
            raise IllegalTransition(f"{sequence.story()} holds a block twice")
        needed = scheduler.kv.blocks_for(scheduler.computed_tokens_of(sequence))
        if len(sequence.blocks) < needed:
            raise IllegalTransition(f"{sequence.story()} lacks blocks for its {needed} blocks of computed tokens")


def _check_places(scheduler: Scheduler, sequences: Mapping[str, Sequence]) -> None:
    places = {
        SequenceState.WAITING: scheduler.waiting.sequences(),
        SequenceState.PREFILL: scheduler.prefilling,
        SequenceState.DECODE: scheduler.decoding.sequences,
    }
    for state, members in places.items():
        expected = {request_id for request_id, sequence in sequences.items() if sequence.state is state}
        found = [member.request_id for member in members]
        if set(found) != expected or len(found) != len(expected):
            raise IllegalTransition(f"requests in state {state} are {sorted(expected)}, listed are {sorted(found)}")
    if len(scheduler.waiting) != len(places[SequenceState.WAITING]):
        raise IllegalTransition("the length of the waiting queue is wrong")
    for slot, sequence in enumerate(scheduler.decoding.sequences):
        if sequence.slot != slot or not scheduler.decoding.is_filed(sequence):
            raise IllegalTransition(f"{sequence.story()} is misfiled in the decode batch")


def _check_counters(scheduler: Scheduler, sequences: Mapping[str, Sequence]) -> None:
    queued = sum(sequence.queued_tokens for sequence in sequences.values())
    if scheduler.queued_prefill_tokens != queued:
        raise IllegalTransition(f"{scheduler.queued_prefill_tokens} prefill tokens are counted, {queued} queued")
    contexts = [scheduler.tokens_of(sequence) for sequence in scheduler.decoding.sequences]
    if scheduler.decoding.context_tokens().tolist() != contexts or scheduler.decoding.context_tokens_sum != sum(
        contexts
    ):
        raise IllegalTransition("the decode batch has lost count of its contexts")
    for sequence in sequences.values():
        if not scheduler.tokens_of(sequence) < sequence.total_tokens:
            raise IllegalTransition(f"{sequence.story()} should have ended")
