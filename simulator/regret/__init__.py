"""How much worse than the best each placement policy is, over traces and loads.

suite   which traces, loads, policies and seeds; what each run is
rows    means over seeds, regrets and their intervals
plot    the greatest regret of each policy, and where it comes from
"""
