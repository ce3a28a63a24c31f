"""Pulls of cached prefixes by the live managers, on modelled instances and links.

Messages, links and engines are models; what is decided is decided by `controlplane/protocols/prefix_pull`.
"""
