"""What the workload looks like: requests of each window, answered and judged on every tier (Cascadia, section 4.4).

window     which requests of a window are taken, and how many there were (pure)
tiers      asks the remaining tiers for their answers
kept       the last samples, for whoever wants to plan with them or to label them (pure)
sampler    one cascade's windows, one after the other, reported to the planner
"""
