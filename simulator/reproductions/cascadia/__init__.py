"""Cascadia (arXiv 2506.04203): plans of a cascade of models against stand-alone models and a planner by load alone.

scores           judge scores and answer lengths of real models, as samples of three workloads
setup            models, devices and sizes of runs
tables           latency tables of the tiers, simulated once and scaled to a trace's requests
workload         a trace on a cascade: its questions, its rate, its targets
planning_problem what every system is given
systems          what is compared: each is a routing with a deployment
cascade_serve    the rival that plans by load alone
run              a deployed system under its arrivals
throughput       the highest rates that a system serves
cases            a trace under a quality target: every system, its SLO scale and its throughput
plans            the plans beside tables 2 and 3, and figure 8
drift            a workload that changes, with and without planning anew
experiment       all runs
accuracy         the replica model beside table 1 and figure 2
explanations     why figures differ
rows             what came out beside what the paper says
sections         the raw results as a page shows them
plots            and as PNG files
"""
