"""Length-specialised stages (CascadeInfer): who serves which lengths, where a boundary lies, who hands off what.

`layout` says which instances form which stage; `refinement` moves the boundary between neighbours; `placement` is
the policy for new requests; `agent` names the requests that are to leave an instance and joins all this to the protocol
in `controlplane/protocols/bid_ask`, one agent per instance; `manager` keeps an instance's agent at the plan in
force and at the peers that are alive, live and in the simulator.
"""
