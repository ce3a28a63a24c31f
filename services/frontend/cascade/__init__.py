"""Requests to a cascade: tiers asked in turn, answers judged, the accepted one sent (`http.cascade_exchange`).

service            what serving one needs
cascades           the cascades in force
latency_estimates  how long their tiers and judges take
judging            asks the cascade router for a score
judge_request      what the router is sent of a request
tier_answer        one tier's answer, read as it comes
hints              what a request asks of its cascade
attempt            one asking of a tier, and what it came to
executor           carries out what the state machine of controlplane.protocols.cascade says for a request
response_metadata  what a response says of how it was come to
keep_alives        tell a streaming client meanwhile that its answer is being worked on
live_stream        an answer that is sure to be accepted, sent while it is being written
"""
