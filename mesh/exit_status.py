"""How a process of the mesh has ended, for whoever started it."""

from enum import IntEnum


class ExitStatus(IntEnum):
    """Exit statuses of `penstock serve`. Supervisors go by them, so they never change."""

    STOPPED = 0
    """By SIGTERM or SIGINT. Only who sent it knows whether the process is to come back: a supervisor that did not
    send it starts the process again."""
    FAILED = 1
    WRONG_SETTINGS = 2
    SUPERSEDED = 3
    """Another process has taken this one's name: to start this one again would take the name back."""
    DRAINED = 4
    """By `penstock drain`: it is to stay away."""
    RESTART = 5
    """By `penstock restart`: it is to be started again, at once. Not 0, so that a supervisor which restarts only
    what fails does it too."""
