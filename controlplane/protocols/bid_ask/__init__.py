"""Bid-ask: an instance finds a taker for each request that it wants to be rid of (CascadeInfer, section 4.4).

    sender                                     receivers
    Ask (the sender's load) -----------------> all candidates
          <------------------------- Bid (load, earliest start) / Pass
    drop the more loaded half, keep the three earliest, take the first to have replied
    Award -----------------------------------> the chosen one queues the request, by the sender's load
          <------------------------- Accepted / Refused
          <------------------------- Ready (attempt n), once it is the first in the queue and a slot is free
    Begun, and the live migration starts ----> or Busy: the sender transmits another; the receiver tries its next
          <------------------------- Starving, after too many Busy: begin this one next; the receiver waits
    Done ------------------------------------>

There is no third party. The paper gives the phases, the choice, the queue and the rule against starvation; what
happens when messages are lost, late or doubled and when either side dies is ours:

- The sender alone says who may have a request. It promises a request to one receiver at a time, begins no transfer
  later than `promise_ms` after the award, and answers Withdrawn to whatever it does not know (any more).
- A receiver that has said Ready holds the slot until the sender answers, or so long that no transfer can still run.
  Every attempt has a number, so that a Ready that was answered Busy once is never acted on later.
- A request that finds no taker simply stays where it is, and decodes on.
"""
