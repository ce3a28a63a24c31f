"""One request's way up a cascade of models: answered, judged, accepted or sent on (Cascadia, section 3.3, figure 4).

state_machine  who answers, who is judged, what is accepted: events in, instructions out
terms          what holds for one request: tiers, thresholds, deadline, how far it may go
confidence     how sure a model is of its answer, told while it is being written
expected_time  what a tier is expected to take
escalation_odds  how likely an answer that is being written will go to the next tier
no_score       how a router that is well says that no judge gave a score
"""
