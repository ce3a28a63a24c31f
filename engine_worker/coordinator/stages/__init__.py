"""A worker's part in length-specialised stages: the shell around `controlplane/policies/stages/agent`.

`coordinator` feeds the agent and does what it says; `links` and `service` are the two ends of what workers tell each
other, `wire` its form; `ended_lengths` remembers what a plan is made from; `plan_watch` follows plans and membership.
"""
