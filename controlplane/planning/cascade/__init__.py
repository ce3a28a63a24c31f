"""The cascade plan (Cascadia, section 3): which share of the requests each tier serves, and on how many GPUs in which
shapes.

    sample       what was seen of the workload: lengths and judge scores of the same requests on every tier
    routing      thresholds -> who answers which request, the quality, the load of each tier
    replica      one replica's latency under load, measured by simulation
    parallelism  the best mix of replicas on f GPUs: the tables l_i(f)
    latency      what the latency of a plan is: the slowest tier's p95, or the mean from end to end
    allocation   GPUs to tiers: the MILP of section 3.2, and its objective alone
    objective    the latency-quality score of section 3.3 and of appendix C
    search       thresholds of the lowest score
    bilevel      algorithm 1: routing and deployment in turn
    early_exit   answers that are given up before their end, and what they cost until then
    plan         the result, as a value that is stored and shown
    observed     what live sampling has seen of a workload
    imputation   stands in for answers of tiers that had no instance while the workload was sampled
    drift        when the workload differs so much from the planned one that the plan must be made anew
"""
