"""Requests to a cascade: tiers asked in turn, answers judged, the accepted one sent.

cascades       the cascades in force, and how long their tiers take
judging        asks the cascade router for a score
tier_answer    one tier's whole answer
ascent         a request's way up, driven by the state machine of controlplane.protocols.cascade
told           what the client is told of it
exchange       the answer over HTTP, keep-alives included
metrics        what is counted of it
"""
