"""Cascadia (arXiv 2506.04203): plans of a cascade of models against stand-alone models and a planner by load alone.

scores       judge scores and answer lengths of real models, as samples of three workloads
setup        models, devices and sizes of runs
tables       latency tables of the tiers, simulated once and scaled to a trace's requests
systems      what is compared: each is a routing with a deployment
cases        a trace under a quality target: every system, its SLO scale and its throughput
drift        a workload that changes, with and without planning anew
experiment   all runs
accuracy     the replica model beside table 1 and figure 2
explanations why figures differ
rows         what came out beside what the paper says
sections     the raw results as a page shows them
plots        and as PNG files
"""
