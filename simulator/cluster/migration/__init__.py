"""Requests that move between modelled instances, by the state machines of `controlplane/protocols/migration`.

`office` starts migrations, holds the bounds and carries the messages; `outgoing` and `incoming` do to an instance what
one migration's state machine says. They are what `engine_worker/coordinator` is in the live mesh.
"""
