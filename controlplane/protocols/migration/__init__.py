"""Live migration of a running request between two instances.

    source                                   target
    Offer ---------------------------------> reserve blocks
          <------------------------- Accept / Refuse
    Round 1 (blocks complete so far) ------> pull them, while the source goes on decoding
          <------------------------- Pulled
    Round 2 (blocks completed meanwhile) --> ...
    pause the request
    FinalMessage (tokens, the last blocks) ----> pull them: from here on the target owns the request
          <------------------------- Committed
    release

Llumnix (OSDI 2024, section 4.2) copies in such rounds, so that the pause does not depend on the context's length; the
handshake, the refusals and the epochs are ours. Who owns the request while a message is lost is decided by two rules:

- A source that has paused resumes only when the target has said that it did not and will not commit. Where it gets
  no answer it gives the request up, and the frontend recovers it from the tokens it has.
- Every handoff raises the request's epoch by one, every recovery by more than any number of handoffs. The frontend
  takes tokens of the highest epoch only, so a target that committed unheard can do no harm.

Disaggregated prefill and decode is the same protocol, ordered when the request comes: the offer is made once the first
blocks of its prompt are computed, the rounds follow the prefill, and the final message follows the first token.

`source` and `target` are the state machines of one migration. `source_manager` and `target_manager` decide for all
migrations of an instance: what is admitted, what waits, what is tried again. `drain` decides where the requests of an
instance go that is to be emptied. The worker (`engine_worker/coordinator`) and the simulator
(`simulator/cluster/migration`) carry out what they say.
"""
