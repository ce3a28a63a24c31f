"""LMetric (section 6): placement by new prefill tokens x batch size, against its rivals as published.

setup        testbed, traces, rivals and the settings that they are tuned over
experiment   what is run
hotspot      a synthetic load under which the product fails, and the detector that saves it
rows         the paper's claims beside what was measured
sections     the raw results as a page shows them
reproduction all of it
"""
