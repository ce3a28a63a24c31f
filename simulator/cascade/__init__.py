"""Latency tables of a cascade's tiers, measured in simulation (Cascadia, section 3.2 and appendix B), and its requests.

tier       a tier's model on its devices: the shapes of replica that it fits on
replica    one replica under a load of given lengths: its p95 and its mean latency
executor   requests on their way from tier to tier
curves     that over rates, remembered by shape and lengths: the tables' source
"""
