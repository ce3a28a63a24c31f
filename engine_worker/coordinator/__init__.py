"""Moves running requests between this worker and others.

`controlplane/protocols/migration` decides. `coordinator` carries out what it says of requests that leave, `incoming` of
those that come; `link` (source) and `service` (target) are the ends of the stream between two workers.
"""
