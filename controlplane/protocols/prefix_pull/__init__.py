"""An instance pulls a prompt's cached prefix from another one instead of computing it.

    target                                    source
    PullManager --Hold, one call per pull-->  HoldManager: pins what is cached, says which blocks
                <--blocks-------------------
    pulls them over the KV transfer agents
    PullManager --the call ends------------>  HoldManager: lets go

The call is the lease: however it ends (the pull is over, cancelled or late, either process dies, a deadline passes),
the source lets go. Whatever goes wrong, the request is computed at the target as if nothing had been tried.
"""
