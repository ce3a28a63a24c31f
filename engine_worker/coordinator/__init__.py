"""Moves running requests between this worker and others, as `controlplane/protocols/migration` says.

`coordinator` starts migrations and holds the bounds; `outgoing` and `incoming` carry out what one migration's state
machine says, against the engine, the request table and the frontends; `arrivals` holds the bounds of those that come;
`link` (source) and `service` (target) are the ends of the stream between two workers; `drain` empties an instance.
"""
